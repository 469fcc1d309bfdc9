"""What is usual for a series: its band, the median and the deviation of the numbers before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median, median_low

from fxguard.history._series import Series

__all__ = [
    "ENOUGH",
    "FLOOR",
    "LEAST",
    "MOST",
    "SCALE",
    "USUAL",
    "band",
    "from_octaves",
    "is_signed",
    "octaves",
]

USUAL = 64  # numbers that say what is usual
ENOUGH = 12  # of them are needed
FLOOR = 0.1  # of a deviation, in octaves: a series never counts as steadier than 7 %
SCALE = 1.4826  # the median of distances from the median becomes a standard deviation
LEAST = -200.0  # octaves that stand for zero
MOST = 1100.0  # and for infinity


def is_signed(series: Series) -> bool:
    """Whether its numbers may be negative, and have a linear axis."""
    return series.detail in ("mean", "share of zeros")


def octaves(series: Series, numbers: Sequence[float]) -> list[float]:
    """Numbers on the scale on which a series is judged: log2 of their magnitudes.

    Means keep their sign, and shares are tenths.
    """
    if series.detail == "share of zeros":
        return [10 * number for number in numbers]
    if series.detail == "mean":
        usual = _usual_size(numbers)
        return [math.copysign(_log2(1 + abs(x) / usual), x) for x in numbers]
    return [_log2(abs(x)) for x in numbers]


def from_octaves(series: Series, numbers: Sequence[float], found: Sequence[float]) -> list[float]:
    """Numbers that lie where some are on that scale, of a series that may be negative.

    Args:
        series: the series.
        numbers: all of its numbers, as they were given to :func:`octaves`.
        found: places on the scale.
    """
    if series.detail == "share of zeros":
        return [x / 10 for x in found]
    usual = _usual_size(numbers)
    return [math.copysign(usual * (2 ** min(abs(x), MOST - 80) - 1), x) for x in found]


def _usual_size(numbers: Iterable[float]) -> float:
    return max(1e-30, median([abs(x) for x in numbers if x == x] or [0.0]))


def _log2(magnitude: float) -> float:
    if not magnitude:
        return LEAST
    if magnitude == math.inf:
        return MOST
    return max(math.log2(magnitude), LEAST)  # NaN stays: Python's max keeps what is first


def band(before: Sequence[float]) -> tuple[float, float] | None:
    """Median and deviation of the measured octaves among the last ones; None if they are few."""
    known = [x for x in before if x == x][-USUAL:]
    if len(known) < ENOUGH:
        return None
    middle = median_low(known)  # as torch has it
    return middle, max(FLOOR, SCALE * median_low(abs(x - middle) for x in known))
