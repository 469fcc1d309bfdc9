"""The numbers of one series over the steps of a training run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from fxguard.history._series import Series

__all__ = ["Track"]


@dataclass(frozen=True, slots=True, repr=False)
class Track:
    """One series over the steps of a training run. Its columns are equally long."""

    series: Series
    rank: int
    # Each row is one step, or several of long ago.
    steps: array[int]
    last_steps: array[int]  # of each row; its step, where it is one
    # Where a number was NaN, `high` is inf, and `low` NaN unless other steps share the row.
    low: array[float]  # the smallest of these steps
    high: array[float]  # the largest of these steps
    runs: array[int]  # that each row is from

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        what = f"{self.series.name}: {len(self)} rows"
        if not self.steps:
            return what
        return f"{what} of steps {self.steps[0]} to {self.last_steps[-1]}, last {self.high[-1]:.4g}"

    __repr__ = __str__
