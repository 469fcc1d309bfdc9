"""How a change between two batches compares with what usually changes from step to step.

Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["UsualChange"]


@dataclass(frozen=True, slots=True)
class UsualChange:
    """The change of one operation between two batches, beside the usual change of its series.

    A change is that of the largest magnitude, in octaves: 1.0 is a factor of two, up or down.
    """

    series: str  # its name in the history
    change: float  # between the two batches; infinite if the operation made a NaN in one of them
    usual: float | None  # a robust deviation, at least 0.1; None if too few steps were measured
    steps: int  # how many changes of the history it is compared with, the last ones
    as_large: int  # how many of these were as large as the change between the two batches

    @property
    def times(self) -> float | None:
        """The change divided by the usual one; None if nobody knows what is usual."""
        return None if self.usual is None else self.change / self.usual

    @property
    def usual_factor(self) -> float | None:
        """The usual change as a factor, 1.07 and more."""
        return None if self.usual is None else 2 ** min(self.usual, 1000.0)

    def to_dict(self) -> dict[str, Any]:
        """As plain data of a record."""
        return {
            "series": self.series,
            "change": self.change,
            "usual_change": self.usual,
            "times": self.times,
            "steps": self.steps,
            "as_large": self.as_large,
        }
