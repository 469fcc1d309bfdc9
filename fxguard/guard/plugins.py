"""What an integration may change about a guard: which methods, what judges, who hears of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.guard.recorder import MakeJudge

__all__ = ["Hear", "Methods", "Plugins"]

# Called with each run of a captured graph and what it returned, None where it raised, before the
# batch knows of it.
Hear = Callable[[GraphRun, Sequence[Any] | None], None]


class Methods:
    """Which methods of a model a guard stands in for: each call of one is a batch.

    A subclass also changes what surrounds them, while the guard is on the model. A copy of the
    model has a deep copy of this object.
    """

    names: tuple[str, ...] = ("forward",)

    def before_install(self, model: Module) -> None:
        """The model is plain, and the guard is about to be put in front of its methods."""

    def after_install(self, model: Module) -> None:
        """The guard stands in front of the model's methods."""

    def before_uninstall(self, model: Module) -> None:
        """The guard is about to be taken away. It expects its functions where it has put them."""

    def after_uninstall(self, model: Module) -> None:
        """The guard is gone."""


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """How one guard differs from that of :func:`fxguard.instrument`."""

    methods: Methods = field(default_factory=Methods)
    judge: MakeJudge | None = None  # None for the rules of fxguard.verdict
    hear: Hear | None = None
    # Whether operations are watched. Otherwise only modules are: eager models stay with Python.
    watches_operations: bool = True
    stream: str = "stderr"  # of `sys`: where reports are printed
