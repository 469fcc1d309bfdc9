"""Frames as one HTML page that needs no network: chart, module tree, table. Knows no torch.

Everything that comes from a model, its source or a file is data: text in the page is escaped,
numbers and names stand in a JSON block, which the page's own script shows as text. A policy in the
page lets no other script run, by hash, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from fxguard.formats import FORMATS, is_mask
from fxguard.records import Frame, Row
from fxguard.report.frames_json import (
    as_json,
    collector_paused,
    have_same_plan,
    layout_of,
    numbers_of,
)

__all__ = ["Sheet", "page"]

# In this order: each uses what stands before it.
SCRIPTS = ("numbers.js", "chart.js", "batches.js", "tree.js", "table.js", "main.js")


@dataclass(frozen=True, slots=True)
class Sheet:
    """One batch on a page."""

    label: str  # "149"
    frames: Sequence[Frame]
    verdict: Sequence[str] = ()  # of this batch
    marked: frozenset[int] = frozenset()  # indices of the frames to look at: blamed, or different
    # The same rows in the other trace, for each frame: as many as it has, None where one is not
    # there. Empty where nothing is compared.
    other: Sequence[Sequence[Row | None]] = ()
    differences: Sequence[Sequence[str]] = ()  # between these rows, as they are shown
    notes: Mapping[int, str] = field(default_factory=dict)  # shown with frames, by their index


def page(
    title: str,
    verdict: Sequence[str],
    sheets: Sequence[Sheet],
    *,
    meta: str = "",
    healthy: bool = False,
    sides: tuple[str, str] | None = None,
) -> str:
    """The text of a page.

    Args:
        title: what the page is about.
        verdict: lines, the most important one first.
        sheets: the batches, at least one; the page begins with the first that has a verdict.
        meta: a line below the title.
        healthy: whether nothing is wrong.
        sides: the names of two traces that are compared.
    """
    with collector_paused():
        data = as_json({**_data(sheets), "sides": sides})
    library, script = _asset("uPlot.iife.min.js"), "\n".join(map(_asset, SCRIPTS))
    script = f'(() => {{\n"use strict";\n{script}}})();\n'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {_hashes(library, script)}"
    first, *more = verdict or ("",)
    lines = f"<p>{html.escape(first)}</p>"
    if more:
        lines += f"<pre>{html.escape(chr(10).join(more))}</pre>"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "META": html.escape(meta),
        "STATE": "healthy" if healthy else "ill",
        "VERDICT": lines,
        "STYLE": _asset("uPlot.min.css") + _asset("page.css"),
        "DATA": _in_html(data),
        "LIBRARY": library,
        "SCRIPT": script,
    }
    # What is filled in holds no placeholder: `<` is escaped in all that is not our own.
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half a surrogate pair


def _data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    plans: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    number = 0  # of the plan
    before: list[Any] = []  # rows of the sheet before
    for index, sheet in enumerate(sheets):
        if not index or not have_same_plan(sheets[index - 1].frames, sheet.frames):
            plan = layout_of(sheet.frames)
            if plan not in plans:
                plans.append(plan)
            number = plans.index(plan)
        rows = [row for frame in sheet.frames for row in frame.rows]
        numbers = numbers_of(rows)
        entry: dict[str, Any] = {
            "label": sheet.label,
            "plan": number,
            "verdict": list(sheet.verdict),
            "marked": sorted(sheet.marked),
            "notes": {str(index): note for index, note in sheet.notes.items()},
            "rows": _with_references(numbers, before),
            "masks": _masks(rows),
        }
        before = numbers
        if sheet.other:
            missing = Row("", note="-")
            others = [row or missing for rows in sheet.other for row in rows]
            entry["other"] = numbers_of(others)
            entry["other_masks"] = _masks(others)
            entry["differences"] = [text for texts in sheet.differences for text in texts]
        listed.append(entry)
    formats = {each.name: [each.max, each.smallest_normal] for each in FORMATS.values()}
    return {"plans": plans, "sheets": listed, "formats": formats}


def _with_references(rows: list[Any], before: list[Any]) -> list[Any]:
    """Rows of which some refer to equal ones: an operation reads what another one has made.

    0 is the row in the same place of the sheet before, a larger number is so many rows back.
    """
    found: list[Any] = []
    places: dict[tuple[Any, ...], int] = {}
    for index, row in enumerate(rows):
        if isinstance(row, str):
            found.append(row)
            continue
        key = tuple(row)
        if index < len(before) and before[index] == row:
            found.append(0)
        elif key in places:
            found.append(index - places[key])
        else:
            found.append(row)
        places[key] = index
    return found


def _masks(rows: Sequence[Row]) -> list[int]:
    """Which rows hold the largest number of their dtype: it says nothing of headroom."""
    found = []
    nearly: dict[str, float] = {}  # of each dtype; most numbers are far below
    for index, row in enumerate(rows):
        if row.dtype not in nearly:
            limit = FORMATS.get(_own(row.dtype))
            nearly[row.dtype] = math.inf if limit is None else 0.9999 * limit.max
        high = row.abs_max
        if high is not None and high >= nearly[row.dtype] and is_mask(_own(row.dtype), high):
            found.append(index)
    return found


def _own(dtype: str) -> str:
    """Of the two dtypes of a row that is compared with another, ``float32 / float16``, its own."""
    return dtype.partition(" / ")[0]


def _in_html(text: str) -> str:
    """JSON that can stand in a script element: the three characters HTML looks for, as escapes."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hashes(*scripts: str) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@cache
def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")
