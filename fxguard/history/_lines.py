"""A history as lines of a terminal: its events, and series as sparklines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from fxguard.history._series import Series
from fxguard.history._telling import Glimpse
from fxguard.history._usual import octaves
from fxguard.history._watch import FLOOR, HUGE, TINY
from fxguard.history.track import Track
from fxguard.report.event import Event
from fxguard.report.sparkline import MARK, sparkline

__all__ = ["lines_of_event", "lines_of_series", "number", "summary"]

WIDTH = 48  # blocks
NAME = 44  # characters
STEADY = 8 * FLOOR  # octaves: what changes by less fills no whole block


def number(value: float) -> str:
    """A number of a series, in three digits; of what is not finite, not which it is."""
    if math.isinf(value):
        return "inf or NaN"
    return "-" if math.isnan(value) else f"{value:.3g}"


def lines_of_event(event: Event, glimpses: Sequence[Glimpse]) -> list[str]:
    """What happened, then a line for each series that tells it."""
    lines = event.verdict
    if not glimpses:
        return lines
    steps = [step for each in glimpses for step in (each.steps[0], each.steps[-1])]
    around = f"steps {min(steps)} to {max(steps)}, {MARK} begins step {event.step}"
    names = [_short(each.series.name) for each in glimpses]
    rows = [
        (name, number(each.before), number(each.after), _around(each))
        for name, each in zip(names, glimpses, strict=True)
    ]
    return [*lines, *_table(("series", "before", "after", around), rows)]


def _around(each: Glimpse) -> str:
    return sparkline(_heights(each.series, each.high), WIDTH, mark=each.mark, span=STEADY)


def _heights(series: Series, numbers: Sequence[float]) -> list[float]:
    """Octaves; zeros lie below the rest, and infinities above it."""
    found = octaves(series, numbers)
    floor = min((x for x in found if x > TINY), default=0.0) - 1
    return [floor if x == TINY else math.inf if x == HUGE else x for x in found]


def lines_of_series(tracks: Sequence[Track]) -> list[str]:
    """The first, the median and the last number of each series, and all of it as a sparkline."""
    return list(_table(("series", "first", "median", "last", "all steps"), map(_whole, tracks)))


def summary(track: Track) -> tuple[float, float, float]:
    """The first, the median and the last number that was measured; NaN if none was."""
    known = [x for x in track.high if x == x]
    return (known[0], median(known), known[-1]) if known else (math.nan,) * 3


def _whole(track: Track) -> tuple[str, ...]:
    drawn = sparkline(_heights(track.series, track.high), WIDTH, span=STEADY)
    return (_short(track.series.name), *map(number, summary(track)), drawn)


def _table(heads: tuple[str, ...], rows: Any) -> Iterator[str]:
    """Names to the left, numbers to the right, sparklines last."""
    table = [heads, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    for name, *numbers, drawn in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
        yield "  " + "  ".join([f"{name:<{widths[0]}}", *cells, drawn]).rstrip()


def _short(name: str) -> str:
    """A name whose middle is left out if it is long."""
    if len(name) <= NAME:
        return name
    head = NAME // 2 - 1
    return f"{name[:head]}…{name[-(NAME - head - 1) :]}"
