"""Gradients that float16 made 0: said once, or reported, and looked for rarely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.graph.source_lines import warn_user
from fxguard.guard._delivery import Delivery
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.lost_gradients import origin_of_lost

__all__ = ["ZeroGradients"]


class ZeroGradients:
    """Tells of the gradients of one model that were lost.

    With ``underflow=`` that is a report; otherwise, and where detection is off, a warning.

    Many are 0 by right, in each step: of a weight behind one that is 0, of an expert that nobody
    asked. So they are looked at in the first step that brings some, the fourth, the sixteenth, …

    Args:
        delivery: of the model's reports.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.warns = True
        self._count = 0  # of backward passes that brought some

    def __call__(self, kept: Iterator[KeptRun], names: Sequence[str]) -> None:
        """A backward has ended; see :data:`~fxguard.guard._backward.OnZero`."""
        weights = [name for name in names if name.startswith("weight ")]
        if not (self.warns and weights):
            return
        self._count += 1
        runs = list(kept) if _is_power_of_four(self._count) else []
        if not runs or self.delivery.loss_scale(runs) is not None:
            return  # a scaler doubles its scale as long as it can
        nothing: Origin | None = None
        origin = or_else(nothing, origin_of_lost, runs, weights)
        if origin is None:
            return
        options = self.delivery.options
        if options.underflow is not None and not options.trace_batch_nums:
            self.delivery.gradients_lost(origin, runs[-1].batch_number)
            return
        self.warns = False
        self.delivery.recorder.notes.setdefault(origin.message, origin)
        warn_user(origin.message)


def _is_power_of_four(number: int) -> bool:
    return not number & (number - 1) and number.bit_length() % 2 == 1
