"""A series for a page: its numbers, its band, and how far each number is from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxguard.history._columns import Columns
from fxguard.history._distances import Distances, distances, octaves_of
from fxguard.history._lines import number, summary
from fxguard.history._packed import MISSING, PER_OCTAVE, packed_numbers
from fxguard.history._series import Kind, Series
from fxguard.history._usual import from_octaves, is_signed
from fxguard.history._watch import HUGE
from fxguard.history.track import Track
from fxguard.report.history_page import EDGES, MapRow

__all__ = ["EACH", "UNKNOWN", "group_of", "row_of"]

EACH = 8  # columns that share a band on the page
SPAN = 3.0  # deviations: half of the width of a band that is drawn
COARSE = 64  # the smallest magnitudes are kept so much less finely: 9 %
UNKNOWN = -128  # a level: not measured, or too little was before
INFINITE = 9  # a level
LINEAR = 65_535  # whole numbers between both ends of a linear axis

GROUPS: dict[Kind, str] = {
    "input": "inputs",
    "graph": "graph",
    "target": "targets",
    "number": "targets",
    "loss": "loss",
    "gradient": "gradients",
    "setting": "optimizer",
    "state": "optimizer",
    "step": "steps",
    "weight": "weights",
    "drift": "weights",
    "time": "time",
}


def row_of(track: Track, columns: Columns, levels: Tensor) -> MapRow:
    """A series, packed.

    Args:
        track: the series.
        columns: of the page.
        levels: of this series, to be filled.
    """
    at, stretches = columns.of(track)
    series, count = track.series, len(columns)
    found = distances(octaves_of(series, track.high), stretches)
    levels[at] = _levels(found)
    first, middle, last = summary(track)
    linear: tuple[float, float] | None = None
    furthest, told = _furthest(track, found)
    if is_signed(series):
        linear = ends = _ends(track)
        numbers = [_on_line(torch.tensor(track.high), ends)]
        low, high = _linear_band(track, found)
        band = [_on_line(low, ends), _on_line(high, ends)]
    else:
        numbers = [_whole(found.octaves)]
        reach = SPAN * found.deviation
        band = [_whole(found.middle - reach), _whole(found.middle + reach)]
    has_low = series.kind in ("operation", "backward") and track.low != track.high
    if has_low:
        low = octaves_of(series, track.low)
        numbers.append((_whole(low) / COARSE).round().int() * COARSE)
    wide = [_spread(each, at, count) for each in numbers]
    wide += [_spread(each, at, count)[::EACH] for each in band]
    return MapRow(
        series.name,
        series.kind,
        series.source,
        group_of(series),
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
    level = size * found.distance.sign()
    level[found.distance.isnan()] = UNKNOWN
    level[found.octaves == HUGE] = INFINITE
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


def group_of(series: Series) -> str:
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
