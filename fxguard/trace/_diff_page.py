"""Two batches next to each other on an HTML page. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import replace

from fxguard.records import Row
from fxguard.report.page import Sheet
from fxguard.trace._diff_text import difference_text
from fxguard.trace.batch_diff import BatchDiff, Match

__all__ = ["sheet_of"]


def sheet_of(batch: BatchDiff) -> Sheet:
    """Both batches on a page: the frames of both, and rows next to each other."""
    frames, other, differences, notes = [], [], [], {}
    for index, match in enumerate(batch.matches):
        if match.a is None or match.b is None:
            notes[index] = f"only in {'A' if match.b is None else 'B'}"
        elif match.renamed_to:
            notes[index] = f"in B: {match.renamed_to}"
        ours, theirs = _side_by_side(match)
        frames.append(replace(match.frame, rows=ours))
        other.append(theirs)
        distances = {id(pair.a): pair.distance for pair in match.rows}
        rows = match.frame.rows
        differences.append(
            [difference_text(distances[id(row)]) if id(row) in distances else "" for row in rows]
        )
    marked = frozenset(i for i, match in enumerate(batch.matches) if match.differs)
    a, b = batch.a.number, batch.b.number
    label = str(a) if a == b else f"{a} against {b}"
    return Sheet(label, frames, (), marked, other, differences, notes)


def _side_by_side(match: Match) -> tuple[tuple[Row, ...], list[Row | None]]:
    if match.a is None:
        rows = match.frame.rows
        return tuple(Row(row.label, note="-", dtype=row.dtype) for row in rows), list(rows)
    partner = {id(pair.a): pair.b for pair in match.rows}
    other = [partner.get(id(row)) for row in match.a.rows]
    ours = tuple(
        row if b is None or b.dtype == row.dtype else replace(row, dtype=f"{row.dtype} / {b.dtype}")
        for row, b in zip(match.a.rows, other, strict=True)
    )
    return ours, other
