"""What an integration may change about a guard: its methods, its judge, who hears of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.guard.recorder import MakeJudge

__all__ = ["Hear", "Methods", "Plugins"]

# Called with each run of a captured graph and what it returned, or None if it raised, before the
# run is added to the batch.
Hear = Callable[[GraphRun, Sequence[Any] | None], None]


class Methods:
    """The methods of a model that a guard replaces: each call of one is a batch.

    A subclass can also change other attributes of the model while the guard is installed. A copy of
    the model has a deep copy of this object.
    """

    names: tuple[str, ...] = ("forward",)

    def before_install(self, model: Module) -> None:
        """Called when the model is plain and the guard is about to be installed."""

    def after_install(self, model: Module) -> None:
        """Called when the guard is in front of the model's methods."""

    def before_uninstall(self, model: Module) -> None:
        """Called before the guard is removed; it expects its functions where it put them."""

    def after_uninstall(self, model: Module) -> None:
        """Called when the guard has been removed."""


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """How one guard differs from a guard of :func:`fxguard.instrument`."""

    methods: Methods = field(default_factory=Methods)
    judge: MakeJudge | None = None  # None for the rules of fxguard.verdict
    hear: Hear | None = None
    # Whether operations are watched. If not, only modules are, and Python runs eager models.
    watches_operations: bool = True
    stream: str = "stderr"  # stream of `sys` where reports are printed
