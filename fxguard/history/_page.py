"""The page of a history: its series by steps, each number against the band of its series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxguard.history._columns import Columns
from fxguard.history._packed import packed_bytes
from fxguard.history._page_rows import EACH, UNKNOWN, row_of
from fxguard.history._series import Kind
from fxguard.history.track import Track
from fxguard.report.event import Cause, Event
from fxguard.report.history_page import Map, MapEvent, history_page
from fxguard.report.in_words import resumed_at

__all__ = ["page_of_history"]

# The kinds of series that tell a cause.
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


def page_of_history(
    name: str,
    verdict: Sequence[str],
    ranks: Mapping[int, Sequence[Track]],
    events: Sequence[Event],
    *,
    resumed: Sequence[int] = (),
    all_ranks: int = 1,
) -> str:
    """The text of the page.

    Args:
        name: of the history.
        verdict: lines, the most important one first.
        ranks: the series of each rank in the order of the page; at least one, none of them empty.
        events: what happened.
        resumed: the steps with which later runs begin.
        all_ranks: how many ranks the history has.
    """
    maps = []
    for rank, tracks in ranks.items():
        columns = Columns(tracks)
        meta = [f"steps {columns.steps[0]} to {columns.last_steps[-1]}, {len(tracks)} series"]
        if all_ranks > 1:
            here = f", {len(ranks)} of them on this page" if 1 < len(ranks) < all_ranks else ""
            meta.append(f"rank {rank} (of {all_ranks} ranks{here})")
        meta += resumed_at(resumed)
        maps.append(_map_of(rank, ", ".join(meta), tracks, columns, events, resumed))
    return history_page(f"History of {name}", verdict, maps)


def _map_of(
    rank: int,
    meta: str,
    tracks: Sequence[Track],
    columns: Columns,
    events: Sequence[Event],
    resumed: Sequence[int],
) -> Map:
    levels = torch.full((len(tracks), len(columns)), UNKNOWN, dtype=torch.int8)
    rows = [row_of(track, columns, levels[place]) for place, track in enumerate(tracks)]
    told = [_event(event, rank, tracks, columns, levels) for event in events]
    packed = packed_bytes(levels)
    return Map(rank, meta, columns.runs(), rows, packed, told, list(resumed), each=EACH)


def _event(
    event: Event, rank: int, tracks: Sequence[Track], columns: Columns, levels: Tensor
) -> MapEvent:
    """An event, and of all series that it names the one that tells it best, if this rank saw it."""
    if event.ranks and rank not in event.ranks:
        return MapEvent(event.step, event.headline, None)
    begin = bisect_left(columns.last_steps, event.step)
    end = bisect_left(columns.steps, event.step + max(event.lead, 0) + 1)
    named = [place for place, track in enumerate(tracks) if track.series.what == event.what]
    if begin >= end or not named:
        return MapEvent(event.step, event.headline, None)

    def best(place: int) -> tuple[bool, int, int]:
        found = levels[place, begin:end]
        far = int(found.where(found != UNKNOWN, 0).abs().max())
        return tracks[place].series.kind in TOLD_BY[event.cause], far, -place

    return MapEvent(event.step, event.headline, max(named, key=best))
