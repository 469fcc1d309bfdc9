"""The page of a history: its series by steps, each number against the band of its series."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.history._distances import Distances, distances
from fxguard.history._lines import number, summary
from fxguard.history._packed import MISSING, PER_OCTAVE, packed_bytes, packed_numbers
from fxguard.history._series import Kind, Series
from fxguard.history._usual import from_octaves, is_signed, octaves
from fxguard.report.event import Cause, Event
from fxguard.report.history_page import EDGES, Map, MapEvent, MapRow, history_page

if TYPE_CHECKING:
    from fxguard.history._shown import ShownHistory
    from fxguard.history.history import Track

__all__ = ["page_of_history"]

EACH = 8  # columns that share a band on the page
SPAN = 3.0  # deviations: half of the width of a band that is drawn
COARSE = 64  # the smallest magnitudes are kept so much less finely: 9 %
UNKNOWN = -128  # a level: not measured, or too little was before
INFINITE = 9  # a level
LINEAR = 65_535  # whole numbers between both ends of a linear axis

GROUPS: dict[Kind, str] = {
    "input": "inputs",
    "target": "targets",
    "loss": "loss",
    "gradient": "gradients",
    "setting": "optimizer",
    "state": "optimizer",
    "step": "steps",
    "weight": "weights",
    "drift": "weights",
    "time": "time",
}
TOLD_BY: dict[Cause, tuple[Kind, ...]] = {
    "data": ("input", "target"),
    "weights": ("drift",),
    "step": ("setting", "state"),
    "gradient": ("gradient", "backward"),
    "operation": ("operation",),
    "growth": (),
    "machine": (),
    "unknown": (),
}


def page_of_history(history: ShownHistory) -> str:
    """The text of the page.

    Raises:
        FxguardError: when the history holds no number, or when a file is damaged.
    """
    order = sorted(history.described.values(), key=lambda one: (one.kind == "time", one.order))
    tracks = [track for one in order if len(track := history.get(one.name))]
    if not tracks:
        raise UsageError(f"the history in {history.folder} holds no number: it has no page")
    steps, last_steps = _columns(tracks)
    places = {step: place for place, step in enumerate(steps)}
    levels = torch.full((len(tracks), len(steps)), UNKNOWN, dtype=torch.int8)
    rows = [_row(track, places, last_steps, levels[place]) for place, track in enumerate(tracks)]
    events = [_event(event, tracks, steps, last_steps, levels) for event in history.events]
    drawn = Map(_runs(steps, last_steps), rows, packed_bytes(levels), events, each=EACH)
    span = f"steps {history.steps[0]} to {history.steps[-1]}, {len(tracks)} series"
    ranks = f", rank {tracks[0].rank} of {len(history.ranks)}" if len(history.ranks) > 1 else ""
    title = f"History of {history.folder.name}"
    return history_page(title, f"{span}{ranks}", history.verdict, drawn)


def _columns(tracks: Sequence[Track]) -> tuple[list[int], list[int]]:
    """The first and the last step of each column: all that any series has."""
    found: dict[int, int] = {}
    for track in tracks:
        for step, last in zip(track.steps, track.last_steps, strict=True):
            found[step] = max(last, found.get(step, last))
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _runs(steps: Sequence[int], last_steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """Columns of the same size that follow each other."""
    found: list[tuple[int, int, int]] = []
    for step, last in zip(steps, last_steps, strict=True):
        size = last - step + 1
        if found and found[-1][1] == size and found[-1][0] + size * found[-1][2] == step:
            found[-1] = (found[-1][0], size, found[-1][2] + 1)
        else:
            found.append((step, size, 1))
    return found


def _row(track: Track, places: dict[int, int], last_steps: Sequence[int], levels: Tensor) -> MapRow:
    at = torch.tensor([places[step] for step in track.steps])
    sizes = [last - step + 1 for step, last in zip(track.steps, track.last_steps, strict=True)]
    found = distances(octaves(track.series, track.high), sizes)
    levels[at] = _levels(found)
    count = len(last_steps)
    series = track.series
    first, middle, last = summary(track)
    furthest, told = _furthest(track, found)
    if is_signed(series):
        linear = _ends(track)
        columns = [_on_line(torch.tensor(track.high), linear)]
        low, high = _linear_band(track, found)
        band = [_on_line(low, linear), _on_line(high, linear)]
    else:
        linear = None
        columns = [_whole(found.octaves)]
        reach = SPAN * found.deviation
        band = [_whole(found.middle - reach), _whole(found.middle + reach)]
    has_low = series.kind in ("operation", "backward") and track.low != track.high
    if has_low:
        low = torch.tensor(octaves(series, track.low))
        columns.append((_whole(low) / COARSE).round().int() * COARSE)
    wide = [_spread(each, at, count) for each in columns]
    wide += [_spread(each, at, count)[::EACH] for each in band]
    return MapRow(
        series.name,
        series.kind,
        series.source,
        _group(series),
        (number(first), number(middle), number(last), told),
        linear,
        has_low,
        furthest,
        packed_numbers(*wide),
    )


def _spread(numbers: Tensor, at: Tensor, count: int) -> Tensor:
    """Numbers of rows, in their columns."""
    found = torch.full((count,), MISSING, dtype=torch.int32)
    found[at] = numbers
    return found


def _whole(octaves: Tensor) -> Tensor:
    return (octaves * PER_OCTAVE).round().nan_to_num(nan=MISSING).to(torch.int32)


def _ends(track: Track) -> tuple[float, float]:
    known = [x for x in track.high if math.isfinite(x)] or [0.0]
    low, high = min(known), max(known)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _on_line(numbers: Tensor, ends: tuple[float, float]) -> Tensor:
    share = (numbers - ends[0]) / (ends[1] - ends[0])
    return (share.clamp(0, 1) * LINEAR).round().nan_to_num(nan=MISSING).to(torch.int32)


def _linear_band(track: Track, found: Distances) -> tuple[Tensor, Tensor]:
    """The band of a series with a linear axis, in its numbers."""
    reach = SPAN * found.deviation
    low, high = (
        torch.tensor(from_octaves(track.series, track.high, end.tolist()))
        for end in (found.middle - reach, found.middle + reach)
    )
    return low, high


def _levels(found: Distances) -> Tensor:
    """How far each number is from its band, as the index of the edge of a colour."""
    edges = torch.tensor(EDGES, dtype=torch.float32)
    size = torch.bucketize(found.distance.abs(), edges, right=True)
    level = (size * found.distance.sign()).nan_to_num(nan=UNKNOWN)
    level[found.octaves > 1024] = INFINITE
    return level.to(torch.int8)


def _furthest(track: Track, found: Distances) -> tuple[float, str]:
    """The largest distance of a series from its band, as a number and in words."""
    far = found.distance.abs().nan_to_num(nan=0.0)
    if not len(far):
        return 0.0, ""
    place = int(far.argmax())
    distance = float(far[place])
    if distance < EDGES[0]:
        return distance, "always in its band"
    side = "above" if found.distance[place] > 0 else "below"
    how = f"{min(distance, 999):.0f} deviations" if distance < 999 else "far"
    return distance, f"{how} {side} at step {track.steps[place]}"


def _event(
    event: Event,
    tracks: Sequence[Track],
    steps: Sequence[int],
    last_steps: Sequence[int],
    levels: Tensor,
) -> MapEvent:
    """An event, and of all series that it names the one that tells it best."""
    begin = bisect_left(last_steps, event.step)
    end = bisect_left(steps, event.step + max(event.lead, 0) + 1)
    named = [place for place, track in enumerate(tracks) if track.series.what == event.what]
    if begin >= end or not named:
        return MapEvent(event.step, event.headline, None)

    def rank(place: int) -> tuple[bool, int, int]:
        found = levels[place, begin:end]
        far = int(found.where(found != UNKNOWN, 0).abs().max())
        return tracks[place].series.kind in TOLD_BY[event.cause], far, -place

    return MapEvent(event.step, event.headline, max(named, key=rank))


def _group(series: Series) -> str:
    """A name for a series and its neighbours: the outer module of an operation, or what it is."""
    if series.kind in GROUPS:
        return GROUPS[series.kind]
    module = series.what.partition(" ")[0] if " " in series.what else ""
    if not module:
        return "outside modules" if series.kind == "operation" else "backward"
    parts = module.split(".")
    digits = [place for place, part in enumerate(parts) if part.isdigit()]
    outer = ".".join(parts[: digits[0] + 1] if digits else parts[:1])
    return outer if series.kind == "operation" else f"{outer}, backward"
