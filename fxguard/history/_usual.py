"""What is usual for a series, from its numbers in plain Python: few of them are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from fxguard.history._series import Series
from fxguard.history._watch import ENOUGH, HUGE, USUAL, band
from fxguard.history._watch import octaves as octaves_of_one

__all__ = ["from_octaves", "is_signed", "octaves", "usual_band"]


def is_signed(series: Series) -> bool:
    """Whether its numbers may be negative, and have a linear axis."""
    return series.has_sign or series.detail == "share of zeros"


def octaves(series: Series, numbers: Sequence[float]) -> list[float]:
    """Numbers on the scale on which a series is judged, see ``in_octaves``: log2 of magnitudes.

    Means and plain numbers keep their sign, and shares are tenths.
    """
    if series.detail == "share of zeros":
        return [10 * number for number in numbers]
    if series.has_sign:
        usual = _usual_size(numbers)
        return [math.copysign(octaves_of_one(1 + abs(x) / usual), x) for x in numbers]
    return [octaves_of_one(x) for x in numbers]


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
    return [math.copysign(usual * (2 ** min(abs(x), HUGE - 80) - 1), x) for x in found]


def _usual_size(numbers: Iterable[float]) -> float:
    return max(1e-30, median([abs(x) for x in numbers if x == x] or [0.0]))


def usual_band(before: Sequence[float]) -> tuple[float, float] | None:
    """Median and deviation of the measured octaves among the last ones; None if they are few."""
    known = [x for x in before if x == x][-USUAL:]
    return band(known) if len(known) >= ENOUGH else None
