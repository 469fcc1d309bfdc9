"""What an integration may change about a guard: its methods, its judge, who hears of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxguard.guard.listeners import MakeListeners
from fxguard.guard.recorder import MakeJudge
from fxguard.install.captures import Hear
from fxguard.install.methods import Methods

__all__ = ["Plugins"]


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """How one guard differs from a guard of :func:`fxguard.instrument`."""

    methods: Methods = field(default_factory=Methods)
    judge: MakeJudge | None = None  # None for the rules of fxguard.verdict
    hear: Hear | None = None
    listeners: MakeListeners = lambda recorder: ()  # tools
    # Whether operations are watched. If not, only modules are, and Python runs eager models.
    watches_operations: bool = True
    stream: str = "stderr"  # stream of `sys` where reports are printed
