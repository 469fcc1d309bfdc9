"""The page of a history: its series by steps, each number against the band of its series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.history._columns import Columns
from fxguard.history._packed import packed_bytes
from fxguard.history._page_rows import EACH, UNKNOWN, row_of
from fxguard.history._series import Kind
from fxguard.report.event import Cause, Event
from fxguard.report.history_page import Map, MapEvent, history_page

if TYPE_CHECKING:
    from fxguard.history._shown import ShownHistory
    from fxguard.history.history import Track

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


def page_of_history(history: ShownHistory) -> str:
    """The text of the page.

    Raises:
        FxguardError: when the history holds no number, or when a file is damaged.
    """
    order = sorted(history.described.values(), key=lambda one: (one.kind == "time", one.order))
    tracks = [track for one in order if len(track := history.get(one.name))]
    if not tracks:
        raise UsageError(f"the history in {history.folder} holds no number: it has no page")
    columns = Columns(tracks)
    levels = torch.full((len(tracks), len(columns)), UNKNOWN, dtype=torch.int8)
    rows = [row_of(track, columns, levels[place]) for place, track in enumerate(tracks)]
    events = [_event(event, tracks, columns, levels) for event in history.events]
    drawn = Map(columns.runs(), rows, packed_bytes(levels), events, each=EACH)
    span = f"steps {history.steps[0]} to {history.steps[-1]}, {len(tracks)} series"
    ranks = f", rank {tracks[0].rank} of {len(history.ranks)}" if len(history.ranks) > 1 else ""
    title = f"History of {history.folder.name}"
    return history_page(title, f"{span}{ranks}", history.verdict, drawn)


def _event(event: Event, tracks: Sequence[Track], columns: Columns, levels: Tensor) -> MapEvent:
    """An event, and of all series that it names the one that tells it best."""
    begin = bisect_left(columns.last_steps, event.step)
    end = bisect_left(columns.steps, event.step + max(event.lead, 0) + 1)
    named = [place for place, track in enumerate(tracks) if track.series.what == event.what]
    if begin >= end or not named:
        return MapEvent(event.step, event.headline, None)

    def rank(place: int) -> tuple[bool, int, int]:
        found = levels[place, begin:end]
        far = int(found.where(found != UNKNOWN, 0).abs().max())
        return tracks[place].series.kind in TOLD_BY[event.cause], far, -place

    return MapEvent(event.step, event.headline, max(named, key=rank))
