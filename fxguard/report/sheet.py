"""Batches as the data of an HTML page: every number as it is shown, and its meaning.

The script of the page only draws and shows. The meaning of a number is decided here, by the rules
of the reports: which rows are outputs, which hold masks, how much headroom is left, what changed
from batch to batch. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from fxguard.formats import FORMATS, is_mask
from fxguard.records import Frame, Row
from fxguard.report.frames_json import layout_of, share_layout
from fxguard.report.headroom import headroom_of, is_output_with_limits

__all__ = ["Sheet", "page_data"]

NOT_THERE = Row("", note="-")  # a row that the other trace lacks


@dataclass(frozen=True, slots=True)
class Sheet:
    """One batch on a page."""

    label: str  # "149"
    frames: Sequence[Frame]
    _: KW_ONLY
    verdict: Sequence[str] = ()  # of this batch
    marked: frozenset[int] = frozenset()  # indices of the frames to look at: blamed or different
    cause: int | None = None  # index of the frame that the page opens on; None for the first marked
    # For each frame, its rows in the other trace: one per row, None for a missing one. Empty if
    # nothing is compared.
    other: Sequence[Sequence[Row | None]] = ()
    differences: Sequence[Sequence[str]] = ()  # between these rows, as shown
    notes: Mapping[int, str] = field(default_factory=dict)  # shown with a frame, by its index


def page_data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    """The input of a page's script, as plain data.

    ``plans`` hold what stays the same from batch to batch: titles, sources, labels, dtypes, and as
    ``outputs`` the positions of the rows in each frame whose ranges the chart shows. ``sheets``
    hold the rest: the rows as text, which of them are masks, and the headroom of each frame in bits
    (``"bad"`` for an inf or a NaN, None if it has none).
    """
    plans: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    number = 0  # number of the plan
    before: list[Any] = []  # rows of the previous sheet
    for index, sheet in enumerate(sheets):
        if not index or sheet.other or not share_layout(sheets[index - 1].frames, sheet.frames):
            plan = _plan_of(sheet)
            if plan not in plans:
                plans.append(plan)
            number = plans.index(plan)
        rows = [row for frame in sheet.frames for row in frame.rows]
        shown = _shown(rows)
        entry: dict[str, Any] = {
            "label": sheet.label,
            "plan": number,
            "verdict": list(sheet.verdict),
            "marked": sorted(sheet.marked),
            "cause": min(sheet.marked, default=None) if sheet.cause is None else sheet.cause,
            "notes": {str(index): note for index, note in sheet.notes.items()},
            "rows": _with_references(shown, before),
            "masks": _masks(rows),
            "headroom": list(_headroom(sheet, plans[number]["outputs"])),
        }
        before = shown
        if sheet.other:
            others = [row or NOT_THERE for in_frame in sheet.other for row in in_frame]
            entry["other"] = _with_references(_shown(others), [])
            entry["other_masks"] = _masks(others)
            entry["differences"] = [text for texts in sheet.differences for text in texts]
        listed.append(entry)
    if len(listed) > 1 and len(plans) == 1 and not any(sheet.other for sheet in sheets):
        for entry, changes in zip(listed, _changes(sheets), strict=True):
            entry["changes"] = changes
    dtypes = {dtype for sheet in sheets for row in _all_rows(sheet) for dtype in [row.dtype]}
    return {
        "plans": plans,
        "sheets": listed,
        "formats": {each.name: [each.max, each.smallest_normal] for each in FORMATS.values()},
        "used": [name for name in FORMATS if name in dtypes],
    }


def _all_rows(sheet: Sheet) -> Iterator[Row]:
    for frame in sheet.frames:
        yield from frame.rows
    for in_frame in sheet.other:
        yield from (row for row in in_frame if row is not None)


def _plan_of(sheet: Sheet) -> dict[str, Any]:
    """The part that stays from batch to batch. A compared row with two dtypes shows both."""
    frames = sheet.frames
    if sheet.other:
        frames = [
            replace(frame, rows=tuple(map(_with_both_dtypes, frame.rows, others)))
            for frame, others in zip(sheet.frames, sheet.other, strict=True)
        ]
    outputs = [
        [place for place, row in enumerate(frame.rows) if is_output_with_limits(row)]
        for frame in sheet.frames
    ]
    return {**layout_of(frames), "outputs": outputs}


def _with_both_dtypes(row: Row, other: Row | None) -> Row:
    if other is None or other.dtype == row.dtype:
        return row
    return replace(row, dtype=f"{row.dtype} / {other.dtype}")


def _shown(rows: Sequence[Row]) -> list[Any]:
    """Smallest and largest magnitude of each row as in a report, or its note."""
    return [
        row.note or "None"
        if row.abs_min is None or row.abs_max is None
        else [f"{row.abs_min:.2e}", f"{row.abs_max:.2e}"]
        for row in rows
    ]


def _with_references(rows: list[Any], before: list[Any]) -> list[Any]:
    """Replace rows by references to equal ones: an operation reads what another one made.

    0 refers to the row in the same place of the previous sheet, a larger number to that many rows
    back.
    """
    written: list[Any] = []
    places: dict[tuple[str, str], int] = {}
    for index, row in enumerate(rows):
        if isinstance(row, str):
            written.append(row)
            continue
        key = tuple(row)
        if index < len(before) and before[index] == row:
            written.append(0)
        elif key in places:
            written.append(index - places[key])
        else:
            written.append(row)
        places[key] = index
    return written


def _masks(rows: Sequence[Row]) -> list[int]:
    """The rows of masks: of infinities on purpose, or of the largest number of their dtype.

    They say nothing about headroom.
    """
    masks = []
    nearly: dict[str, float] = {}  # for each dtype; most numbers are far below
    for index, row in enumerate(rows):
        if row.dtype not in nearly:
            limit = FORMATS.get(row.dtype)
            nearly[row.dtype] = math.inf if limit is None else 0.9999 * limit.max
        high = row.abs_max
        is_limit = high is not None and high >= nearly[row.dtype] and is_mask(row.dtype, high)
        if row.mask or is_limit:
            masks.append(index)
    return masks


def _headroom(sheet: Sheet, outputs: Sequence[Sequence[int]]) -> Iterator[float | str | None]:
    """The headroom of each frame, with the digits that are shown; of two traces the smaller one."""
    for index, places in enumerate(outputs):
        rows: list[Row | None] = [sheet.frames[index].rows[place] for place in places]
        if sheet.other:
            rows += [sheet.other[index][place] for place in places]
        bits = headroom_of(row for row in rows if row is not None)
        if bits == -math.inf:
            yield "bad"
        else:
            yield round(bits, 1) if bits < math.inf else None


def _changes(sheets: Sequence[Sheet]) -> list[list[float | str | None]]:
    """For each batch and frame: how many doublings the largest magnitude is above the median.

    The median is that of the frame over all batches. None if a frame has no number.
    """
    largest = [[_largest(frame) for frame in sheet.frames] for sheet in sheets]
    by_frame = []
    for column in zip(*largest, strict=True):
        known = sorted(x for x in column if x is not None)
        median = known[(len(known) - 1) // 2] if known else 0.0  # the lower one of two medians
        by_frame.append([None if x is None else _doublings(median, x) for x in column])
    return [list(row) for row in zip(*by_frame, strict=True)] or [[] for _ in sheets]


def _largest(frame: Frame) -> float | None:
    """The largest magnitude in the outputs of a frame; a NaN is beyond all of them."""
    known = [row.abs_max for row in frame.outputs if row.abs_max is not None]
    return max((math.inf if math.isnan(x) else x for x in known), default=None)


def _doublings(before: float, now: float) -> float | str | None:
    if before == now:
        return 0
    if before < 0 or now < 0:  # not a magnitude, but a file may contain it
        return None
    if before in (0, math.inf) or now in (0, math.inf):
        return "inf" if now > before else "-inf"
    return round(math.log2(now) - math.log2(before), 4)
