"""How many backwards the gradients are the sum of that an optimizer's step reads, as a series."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxguard.history._open_step import OpenStep
from fxguard.history._series import SUMMED
from fxguard.measure.at_hand import version_of
from fxguard.measure.parts import part_here

__all__ = ["Summed"]


class Summed:
    """Counts them by one of the gradients: autograd adds to a gradient in place.

    A gradient that was made anew, set to zero or clipped between two backwards counts as one that
    a single backward has made.

    Args:
        step: the step that runs.
        title: of the optimizer's step.
    """

    def __init__(self, step: OpenStep, title: str) -> None:
        self.step = step
        self._series = step.series("gradient", title, detail=SUMMED, order=-1)
        self._probe = -1  # position of the gradient that is looked at
        self._seen: tuple[int, int | None] = (0, None)  # where it lay, and how often it was written
        self._count = 0

    def backward_ended(self, gradients: Sequence[Tensor | None]) -> None:
        """See whether a backward has added to the gradient."""
        probe = part_here(gradients[self._probe]) if self._probe >= 0 else None
        if probe is None:
            found = (
                (at, part) for at, x in enumerate(gradients) if (part := part_here(x)) is not None
            )
            self._probe, probe = next(found, (-1, None))
            self._count = 0
            if probe is None:  # or all are sparse
                return
        place, written = probe.data_ptr(), version_of(probe)
        before, self._seen = self._seen, (place, written)
        if written is None or before == self._seen:  # nobody counts, or it is of other weights
            return
        is_added = before[1] is not None and (place, written) == (before[0], before[1] + 1)
        self._count = self._count + 1 if is_added else 1

    def note(self) -> None:
        """Note how many there are, when a step reads them."""
        if self._count:
            self.step.note(self._series, self._count, self._count)
