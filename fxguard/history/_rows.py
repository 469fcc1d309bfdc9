"""The last rows of a run, as a table in memory."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from fxguard.history._series import Row

__all__ = ["KEPT", "Rows"]

KEPT = 256  # rows


class Rows:
    """A ring of the last rows: a line for each step, a column for each series."""

    def __init__(self) -> None:
        self._table = torch.full((KEPT, 64), torch.nan, dtype=torch.float64)
        self._steps = [0] * KEPT
        self._count = 0

    def add(self, row: Row) -> Tensor:
        """Take a row; return its numbers as a view of the table, one for each series."""
        width = len(row.high)
        if width > self._table.shape[1]:
            wider = torch.full((KEPT, 2 * width), torch.nan, dtype=torch.float64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        place = self._count % KEPT
        line = self._table[place]
        line[width:] = torch.nan
        line[:width] = torch.frombuffer(array("d", row.high), dtype=torch.float64)
        self._steps[place] = row.step
        self._count += 1
        return line[:width]

    def last(self, count: int, series: int) -> tuple[list[int], Tensor]:
        """Steps and numbers of at most so many of the last rows, the oldest first."""
        count = min(count, self._count, KEPT)
        places = [place % KEPT for place in range(self._count - count, self._count)]
        return [self._steps[place] for place in places], self._table[places, :series]
