"""The last rows of a run, as a table in memory."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from fxguard.history._series import Row

__all__ = ["KEPT", "Rows"]

KEPT = 256  # rows


class Rows:
    """A ring of the last rows: a line for each step, a column for each series."""

    def __init__(self) -> None:
        self._numbers, self._table = _unknown(64)
        self._steps = [0] * KEPT
        self._count = 0
        self._widest = 0

    def add(self, row: Row) -> None:
        """Take a row."""
        width = len(row.high)
        if width > self._table.shape[1]:
            before, (self._numbers, self._table) = self._table, _unknown(2 * width)
            self._table[:, : before.shape[1]] = before
        place = self._count % KEPT
        if width < self._widest:
            self._table[place, width:] = torch.nan
        self._widest = max(self._widest, width)
        begin = place * self._table.shape[1]
        self._numbers[begin : begin + width] = array("d", row.high)  # no operation of torch
        self._steps[place] = row.step
        self._count += 1

    @property
    def count(self) -> int:
        """How many rows were added."""
        return self._count

    def block(self, rows: int) -> Tensor:
        """So many of the last rows, of which a whole number were added and the ring has room."""
        end = (self._count - 1) % KEPT + 1
        return self._table[end - rows : end]

    def last(self, count: int, series: int) -> tuple[list[int], Tensor]:
        """Steps and numbers of at most so many of the last rows, the oldest first."""
        count = min(count, self._count, KEPT)
        places = [place % KEPT for place in range(self._count - count, self._count)]
        return [self._steps[place] for place in places], self._table[places, :series]


def _unknown(width: int) -> tuple[array[float], Tensor]:
    """Numbers, and a table that has their memory."""
    numbers = array("d", [math.nan]) * (KEPT * width)
    return numbers, torch.frombuffer(numbers, dtype=torch.float64).view(KEPT, width)
