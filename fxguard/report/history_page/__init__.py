"""A training run as one HTML page that needs no network: a map of its series by steps, its events.

What a number means was decided by who made it; here it is packed, and drawn. Knows no torch.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib import resources
from typing import Any

from fxguard.report.page import style, verdict_html
from fxguard.report.scripted_page import in_html, one_script, scripted_page

__all__ = ["EDGES", "Map", "MapEvent", "MapRow", "history_page"]

# Deviations from the middle of a band at which a colour begins, from pale to strong.
EDGES = (2, 3, 4, 6, 8, 12, 16, 32)

# In this order: each uses what stands before it.
SCRIPTS = ("data.js", "steps.js", "map.js", "lines.js", "table.js", "main.js")


@dataclass(frozen=True, slots=True)
class MapRow:
    """One series."""

    name: str
    kind: str
    source: str
    group: str  # of neighbours that belong together: a module, "gradients"
    texts: tuple[str, str, str, str]  # first, median and last number, and where it was furthest
    linear: tuple[float, float] | None  # the ends of its axis; None for one in octaves
    has_low: bool  # whether there is a smallest number beside the largest one
    furthest: float  # deviations, in the step in which it was furthest from its band
    packed: str  # its numbers and its band


@dataclass(frozen=True, slots=True)
class MapEvent:
    """Something that happened."""

    step: int
    headline: str
    row: int | None  # what changed first


@dataclass(frozen=True, slots=True)
class Map:
    """A training run as it is drawn, as one rank measured it."""

    rank: int
    meta: str  # a line on it
    columns: list[tuple[int, int, int]]  # runs of columns: first step, steps of each, how many
    rows: list[MapRow]
    levels: str  # how far each number is from its band, packed
    events: list[MapEvent]
    resumed: list[int]  # steps with which later runs begin
    _: KW_ONLY
    each: int  # columns that share a band


def history_page(title: str, verdict: Sequence[str], maps: Sequence[Map]) -> str:
    """The text of a page.

    Args:
        title: what the page is about.
        verdict: lines, the most important one first.
        maps: the run, as each rank measured it; the page opens with the first.
    """
    script = one_script([*map(_asset, SCRIPTS)])
    parts = {
        "TITLE": html.escape(title),
        "META": html.escape(maps[0].meta),
        "STATE": "ill" if maps[0].events else "healthy",
        "VERDICT": verdict_html(verdict),
        "STYLE": style() + _asset("history.css"),
        "DATA": "\n".join(map(_data_of, maps)),
        "SCRIPT": script,
    }
    return scripted_page(_asset("history.html"), (script,), parts)


def _data_of(drawn: Map) -> str:
    """What the page knows of a rank, in two parts: the larger one is read when it is needed."""
    data = {
        "rank": drawn.rank,
        "meta": drawn.meta,
        "columns": drawn.columns,
        "each": drawn.each,
        "edges": EDGES,
        "events": [[event.step, event.headline, event.row] for event in drawn.events],
        "resumed": drawn.resumed,
        "rows": [
            [
                *(row.name, row.kind, row.source, row.group, row.texts, row.linear),
                *(row.has_low, round(row.furthest, 1)),
            ]
            for row in drawn.rows
        ],
        "levels": drawn.levels,
    }
    packed = [row.packed for row in drawn.rows]
    return f"{_json('data', drawn.rank, data)}\n{_json('numbers', drawn.rank, packed)}"


def _json(name: str, rank: int, data: Any) -> str:
    text = in_html(json.dumps(data, allow_nan=False, separators=(",", ":")))
    begin = f'<script type="application/json" id="{name}-{rank}" data-rank="{rank}">'
    return f"{begin}{text}</script>"


@cache
def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")
