"""The few series that tell an event: what it names, what left its band next, the loss."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fxguard.history._series import Series
from fxguard.history._usual import octaves, usual_band
from fxguard.history._watch import USUAL
from fxguard.history.track import Track
from fxguard.report.event import Event

__all__ = ["LEFT", "Glimpse", "telling"]

LEFT = 6.0  # deviations from the middle of a band: a series has left it
BEFORE, BEHIND = 32, 16  # rows that are shown
SLOW = 2048  # rows before a climb
NAMED, FIRST = 3, 2  # series
LATER = 3  # steps after the loss moved in which the largest change is looked for


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A series around an event."""

    series: Series
    before: float  # the median of what was measured in the 64 steps before; NaN if nothing was
    after: float  # what is furthest from that, in the steps up to the one in which the loss moved
    after_step: int
    deviations: float  # of `after` from its band; NaN where too little was measured before
    left: int | None  # the first step outside its band
    steps: tuple[int, ...]  # that are shown
    high: tuple[float, ...]  # the largest of each
    mark: int  # index of the step of the event

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **self.series.told(),
            "detail": self.series.detail,
            "before": self.before,
            "after": self.after,
            "after_step": self.after_step,
            "deviations": self.deviations,
            "steps": list(self.steps),
            "high": list(self.high),
        }


def telling(event: Event, tracks: Iterable[Track]) -> list[Glimpse]:
    """The series to look at, in order of execution, at most six.

    Args:
        event: what happened.
        tracks: all series of the history.
    """
    slow = event.cause == "growth"
    seen = [found for track in tracks if (found := _glimpse(event, track, slow)) is not None]
    seen.sort(key=lambda each: each.series.order)
    named = [each for each in seen if each.series.what == event.what]
    chosen = _furthest([each for each in named if each.left is not None] or named, NAMED)
    left = [each for each in seen if each.left is not None and each.series.kind != "time"]
    left.sort(key=lambda each: (each.left, each.series.order))
    chosen += _others(left, chosen, FIRST)
    losses = [each for each in seen if each.series.kind == "loss"]
    if not any(each.series.kind == "loss" for each in chosen):
        chosen += _furthest(losses, 1)
    return sorted(chosen, key=lambda each: each.series.order)


def _glimpse(event: Event, track: Track, slow: bool) -> Glimpse | None:
    at = bisect_left(track.last_steps, event.step)
    begin = max(0, at - (SLOW if slow else BEFORE))
    end = min(len(track), at + BEHIND)
    until = bisect_right(track.steps, event.step + max(event.lead, 0) + LATER)
    if at >= end or until <= at:
        return None
    # Some series are measured in every tenth step only.
    early = max(0, at - 10 * USUAL)
    found = octaves(track.series, track.high[early:until])
    usual = usual_band(found[: at - early])
    behind = found[at - early :]
    left: int | None = None
    place = 0
    if usual is not None:
        middle, deviation = usual
        distances = [(x - middle) / deviation for x in behind]
        outside = (i for i, x in enumerate(distances) if abs(x) > LEFT)
        first = next(outside, None)
        left = None if first is None else track.steps[at + first]
        known = [i for i, x in enumerate(distances) if x == x]
        place = max(known, key=lambda i: abs(distances[i]), default=0)
    before = [x for x in track.high[early:at] if x == x][-USUAL:]
    return Glimpse(
        track.series,
        median(before) if before else math.nan,
        track.high[at + place],
        track.steps[at + place],
        math.nan if usual is None else distances[place],
        left,
        tuple(track.steps[begin:end]),
        tuple(track.high[begin:end]),
        at - begin,
    )


def _furthest(seen: Iterable[Glimpse], most: int) -> list[Glimpse]:
    return sorted(seen, key=_distance, reverse=True)[:most]


def _distance(each: Glimpse) -> float:
    return abs(each.deviations) if each.deviations == each.deviations else 0.0


def _others(seen: Sequence[Glimpse], chosen: Sequence[Glimpse], most: int) -> list[Glimpse]:
    """The first of those that are not chosen, of each kind one."""
    found: list[Glimpse] = []
    kinds = set[str]()
    for each in seen:
        if each in chosen or each.series.kind in kinds or each.series.kind == "loss":
            continue
        kinds.add(each.series.kind)
        found.append(each)
    return found[:most]
