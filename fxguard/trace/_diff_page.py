"""Two batches side by side on an HTML page. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxguard.records import Row
from fxguard.report.sheet import Sheet
from fxguard.trace import _usual_text
from fxguard.trace.batch_diff import BatchDiff, Match
from fxguard.trace.diff_text import difference_text

__all__ = ["sheet_of"]


def sheet_of(batch: BatchDiff) -> Sheet:
    """Both batches on a page: the frames of both, rows side by side, and their differences."""
    frames, other, differences, notes = [], [], [], {}
    for index, match in enumerate(batch.matches):
        if note := "; ".join(_notes(match)):
            notes[index] = note
        in_a, in_b = _side_by_side(match)
        frames.append(replace(match.frame, rows=tuple(in_a)))
        other.append(in_b)
        distances = {id(pair.a): pair.distance for pair in match.rows}
        differences.append(
            [difference_text(distances[id(row)]) if id(row) in distances else "" for row in in_a]
        )
    a, b = batch.a.number, batch.b.number
    return Sheet(
        str(a) if a == b else f"{a} against {b}",
        frames,
        marked=frozenset(i for i, match in enumerate(batch.matches) if match.differs),
        other=other,
        differences=differences,
        notes=notes,
    )


def _notes(match: Match) -> Iterator[str]:
    if match.a is None or match.b is None:
        yield f"only in {'A' if match.b is None else 'B'}"
    if match.renamed_to:
        yield f"in B: {match.renamed_to}"
    if match.differs and match.times_usual is not None:
        yield f"{_usual_text.times_text(match)} times its usual change"


def _side_by_side(match: Match) -> tuple[list[Row], list[Row | None]]:
    """The rows of the first trace, and for each the row of the second, if there is one."""
    if match.a is None:
        rows = match.frame.rows
        return [Row(row.label, note="-", dtype=row.dtype) for row in rows], list(rows)
    in_b = {id(pair.a): pair.b for pair in match.rows}
    return list(match.a.rows), [in_b.get(id(row)) for row in match.a.rows]
