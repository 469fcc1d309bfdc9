"""Where the first bad gradient of a backward began, while what led to it is still there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.graph.one_operation import OneOperation
from fxguard.plan.blame import Blame
from fxguard.ranks.gathering import Gather, nothing_gathered
from fxguard.records import Range
from fxguard.report.report import Report
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.backward_flow import BackwardFlow
from fxguard.verdict.loss_scale import gradient_without

__all__ = ["Began", "FirstGradient", "OnBackwardReport"]


@dataclass(frozen=True, slots=True)
class Began:
    """The operation that returned the first bad gradient, in a second run of its graph."""

    backward: BackwardFlow
    blame: Blame
    seen: BackwardEvidence | None
    scale: float = 1.0  # the divisor of the incoming gradients
    factor: float = 1.0  # of :func:`~fxguard.verdict.loss_scale.factor_to_blame`

    def divided_by(self, divisor: float) -> Range | None:
        """The range of the same gradient if incoming gradients are also divided by a number."""
        return gradient_without(self.backward, self.blame, self.scale * divisor)

    @property
    def kept(self) -> KeptRun:
        """The graph run."""
        return self.backward.kept


@dataclass(frozen=True, kw_only=True)
class FirstGradient:
    """The first origin of a report on a backward, after second runs of its graphs."""

    origin: Origin  # its description
    kept: Sequence[KeptRun]  # graph runs that gradients reached, in the order of their forward
    began: Began | None = None  # None if no operation of these graphs returned it
    # Whether every graph ran again, and no gradient was bad then.
    was_healthy: bool = False
    most: float = 0.0  # the largest gradient that these graphs returned
    loss_scale: float | None = None  # by which the incoming gradients were divided
    gather: Gather = nothing_gathered  # gathers weights that a second run reads

    @property
    def operation(self) -> OneOperation | None:
        """The operation whose backward returned it, with its operands."""
        began = self.began
        return None if began is None or began.seen is None else began.seen.operation


# Adds to a report on a backward what a tool knows of its first origin.
OnBackwardReport = Callable[[Report, FirstGradient], Report]
