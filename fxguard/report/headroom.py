"""How close the outputs of frames came to the limits of their dtypes. Knows nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxguard.formats import headroom
from fxguard.records import Frame, Row, RowRole

__all__ = ["Nearest", "headroom_of", "is_output_with_limits", "nearest", "outputs_with_limits"]

EXACT = ("int", "uint", "bool")  # dtypes of indices and masks, such as those returned by a router


@dataclass(frozen=True, slots=True)
class Nearest:
    """The output that came closest to the largest number of its dtype."""

    frame: Frame
    row: Row
    largest: float  # the largest magnitude in it
    bits: float  # how many times that can double


def is_output_with_limits(row: Row) -> bool:
    """Whether a row is an output other than integers and booleans, which have no range to leave."""
    return row.role is RowRole.OUTPUT and not row.dtype.startswith(EXACT)


def outputs_with_limits(frame: Frame) -> list[Row]:
    """The outputs of a frame for which :func:`is_output_with_limits` is true."""
    return [row for row in frame.rows if is_output_with_limits(row)]


def headroom_of(rows: Iterable[Row]) -> float:
    """The least headroom of some rows, see :func:`fxguard.formats.headroom`.

    Infinity if no row has a limit, minus infinity if one holds an inf or a NaN. Masks do not count.
    """
    numbers = ((row.dtype, row.abs_max) for row in rows if not row.mask)
    known = (headroom(dtype, largest) for dtype, largest in numbers if largest is not None)
    return min(known, default=math.inf)


def nearest(frames: Iterable[Frame]) -> Nearest | None:
    """The first output with the least headroom; None if no output has a limit."""
    best: Nearest | None = None
    for frame in frames:
        for row in outputs_with_limits(frame):
            if row.abs_max is None:
                continue
            bits = headroom(row.dtype, row.abs_max)
            if math.isfinite(bits) and (best is None or bits < best.bits):
                best = Nearest(frame, row, row.abs_max, bits)
    return best
