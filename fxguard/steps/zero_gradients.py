"""Gradients that float16 made 0: a warning or a report, rarely checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.forgiving import or_else
from fxguard.source.lines import warn_user
from fxguard.steps._step_reports import StepReports
from fxguard.steps.lost_gradients import origin_of_lost

__all__ = ["ZeroGradients"]


class ZeroGradients:
    """Tells of lost gradients of one model.

    With ``underflow=`` they are reported; otherwise, or if detection is off, they cause a warning.

    Many gradients are rightly 0 in each step, such as that of a weight behind one that is 0, or of
    an expert that was not chosen. So only the first step with zero gradients is examined, then the
    fourth, the sixteenth, …

    Args:
        reports: who reports on the model.
    """

    def __init__(self, reports: StepReports) -> None:
        self.reports = reports
        self.warns = True
        self._count = 0  # of backward passes with zero gradients

    def __call__(self, kept: Iterator[KeptRun], names: Sequence[str]) -> None:
        """Called when a backward has ended; see :data:`~fxguard.steps.backward.OnZero`."""
        weights = [name for name in names if name.startswith("weight ")]
        if not (self.warns and weights):
            return
        self._count += 1
        runs = list(kept) if _is_power_of_four(self._count) else []
        if not runs or self.reports.loss_scale(runs) is not None:
            return  # a scaler keeps doubling its scale as long as it can
        nothing: Origin | None = None
        origin = or_else(nothing, origin_of_lost, runs, weights)
        if origin is None:
            return
        options = self.reports.options
        if options.underflow is not None and not options.trace_batch_nums:
            self.reports.gradients_lost(origin, runs[-1].batch_number)
            return
        self.warns = False
        self.reports.note(origin)
        warn_user(origin.message)


def _is_power_of_four(number: int) -> bool:
    return not number & (number - 1) and number.bit_length() % 2 == 1
