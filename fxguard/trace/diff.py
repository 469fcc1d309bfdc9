"""Where two traces part. Knows nothing of torch."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.records import Frame, Row, RowRole
from fxguard.report.page import Sheet, page
from fxguard.report.strict_json import strict_json
from fxguard.trace.batch_diff import BatchDiff, Match, compare_batches
from fxguard.trace.file import load_trace
from fxguard.trace.trace import Trace, TracedBatch

__all__ = ["Diff", "diff"]

SHOWN = 20  # rows in a notebook

ELEMENTS = "compared: smallest and largest magnitudes; not compared: elements"

Traced = Trace | TracedBatch | Sequence[Frame] | str | Path


@dataclass(frozen=True, slots=True)
class Diff:
    """Two traces next to each other: where they part.

    What is compared are ranges: the smallest and largest magnitude of each tensor. Tensors whose
    ranges agree may have other elements, such as the same ones in another order.

    Example:
        >>> found = fxguard.diff("traces/before.jsonl", "traces/after.jsonl")
        >>> if found.first is not None:
        ...     print(found)
    """

    a: str  # what the first trace is called: its path, or its model's class
    b: str
    batches: tuple[BatchDiff, ...]  # at least one
    tolerance: float | None = None  # None: by dtype

    @property
    def first(self) -> Match | None:
        """The first operation that made something else; None where there is none."""
        return next(self._differing(), None)

    @property
    def largest(self) -> Match | None:
        """The operation whose results are farthest apart, the first of several."""
        return max(self._differing(), key=lambda match: match.distance, default=None)

    @property
    def differs(self) -> bool:
        """Whether anything that is in both made something of another range."""
        return self.first is not None

    @property
    def compared(self) -> int:
        """How many frames are in both and have numbers in both."""
        return sum(match.compared for batch in self.batches for match in batch.aligned)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and the ranges of all of it agree."""
        return self.compared > 0 and not self.differs

    def _differing(self) -> Iterator[Match]:
        return (match for batch in self.batches for match in batch.differing)

    @property
    def verdict(self) -> list[str]:
        """Where they part, in lines."""
        found = next((batch for batch in self.batches if batch.differing), None)
        if found is None:
            if not self.compared:
                in_both = sum(len(batch.aligned) for batch in self.batches)
                why = f"of {in_both} frames in both, none has numbers in both"
                what = f"nothing could be compared: {why if in_both else 'no frame is in both'}"
                return [what, *_alone(self.batches)]
            return [f"ranges agree: {_counted(self.batches)}", ELEMENTS, *_alone(self.batches)]
        first, largest = self.first, self.largest
        assert first is not None
        assert largest is not None
        lines = [
            f"they part at {first.frame.title}{_at(found)}",
            f"  {_why(first, found)}",
            *_lines(first),
        ]
        if largest is not first:
            where = next(batch for batch in self.batches if largest in batch.matches)
            lines.append(f"the largest difference: {largest.frame.title}{_at(where)}")
            lines += _lines(largest)
        return [*lines, _counted(self.batches), ELEMENTS, *_alone([found])]

    def __str__(self) -> str:
        return "\n".join([f"A: {self.a}", f"B: {self.b}", "", *self.verdict])

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """Every operation that differs as one table, a row for each value that it made.

        Args:
            tablefmt: any table format that tabulate knows.
            most: only so many rows, the first ones.
        """
        from tabulate import tabulate

        rows = [
            [
                batch.a.number,
                match.frame.title,
                pair.a.label,
                *_cells(pair.a),
                *_cells(pair.b),
                _rounded(pair.distance),
                str(match.frame.source or ""),
            ]
            for batch in self.batches
            for match in batch.differing
            for pair in match.of(RowRole.OUTPUT)
            if pair.differs
        ][:most]
        if tablefmt in ("github", "pipe"):
            rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
        headers = (
            *("batch", "operation", "value", "A abs min", "A abs max"),
            *("B abs min", "B abs max", "difference", "source"),
        )
        return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain dicts, lists, strings and numbers."""
        return {
            "a": self.a,
            "b": self.b,
            "tolerance": self.tolerance,
            "differs": self.differs,
            "verdict": self.verdict,
            "batches": [
                {
                    "batch_a": batch.a.number,
                    "batch_b": batch.b.number,
                    "aligned": len(batch.aligned),
                    "compared": sum(match.compared for match in batch.aligned),
                    "only_in_a": [match.frame.title for match in batch.only_in_a],
                    "only_in_b": [match.frame.title for match in batch.only_in_b],
                    "differing": [_plain(match) for match in batch.differing],
                }
                for batch in self.batches
            ],
        }

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>{self.to_table('html', SHOWN)}"

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: where they part, and both curves.

        Args:
            path: of the file; written over.
        """
        text = page(
            "Where two traces part" if self.differs else "Two traces",
            self.verdict,
            [_sheet(batch) for batch in self.batches],
            meta=f"A: {self.a}; B: {self.b}",
            healthy=self.agrees,
            sides=(self.a, self.b),
        )
        Path(path).write_text(text, encoding="utf-8")

    def to_json(self, indent: int | None = None) -> str:
        """The same as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)


def diff(a: Traced, b: Traced, *, tolerance: float | None = None) -> Diff:
    """Compare two traces, operation by operation.

    Batches are paired by their numbers; where each trace has one batch, or one was given, these
    two are. Frames are aligned by name and order, and may be inserted, removed, renamed or fused.

    Args:
        a: a :class:`~fxguard.Trace` or one batch of it, a file that ``trace_to`` wrote, or the
            frames of a batch (:meth:`Guard.frames`).
        b: likewise.
        tolerance: how far apart two ranges may be, relative to the larger one:
            ``max(|a.max - b.max|, |a.min - b.min|) / max(a.max, b.max)``. None allows what
            rounding makes of them: 1e-5 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for
            bfloat16, by the coarsest dtype in either trace.

    Raises:
        FxguardError: when a file is not a trace, or no batch of one is in the other.

    Example:
        >>> trace = fxguard.load_trace("traces/T5ForConditionalGeneration-0.jsonl")
        >>> print(fxguard.diff(trace.batches[0], trace.batches[1]))
    """
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"tolerance has to be 0 or more, got {tolerance!r}")
    name_a, batches_a = _read(a)
    name_b, batches_b = _read(b)
    pairs = _paired(batches_a, batches_b)
    return Diff(
        name_a, name_b, tuple(compare_batches(x, y, tolerance) for x, y in pairs), tolerance
    )


def _read(given: Traced) -> tuple[str, Sequence[TracedBatch]]:
    if isinstance(given, (str, Path)):
        return str(given), load_trace(given).batches
    if isinstance(given, Trace):
        return given.model, given.batches
    batch = given if isinstance(given, TracedBatch) else _as_batch(given)
    root = batch.frames[-1].kind if batch.frames else "nothing"
    return f"{root}, batch {batch.number}", [batch]


def _as_batch(given: Any) -> TracedBatch:
    frames = tuple(given) if isinstance(given, Iterable) else None
    if frames is None or not all(isinstance(frame, Frame) for frame in frames):
        raise UsageError(
            f"diff takes traces, batches of traces, files or lists of frames, got {given!r}"
        )
    return TracedBatch(frames[-1].batch_number if frames else 0, frames)


def _paired(
    a: Sequence[TracedBatch], b: Sequence[TracedBatch]
) -> list[tuple[TracedBatch, TracedBatch]]:
    for name, batches in (("first", a), ("second", b)):
        if not batches:
            raise UsageError(f"the {name} trace has no batch")
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    of_number = {batch.number: batch for batch in b}
    pairs = [(batch, of_number[batch.number]) for batch in a if batch.number in of_number]
    if not pairs:
        said = (_listed([str(batch.number) for batch in batches]) for batches in (a, b))
        raise UsageError("no batch is in both traces: one has {}, the other {}".format(*said))
    return pairs


def _lines(match: Match) -> Iterator[str]:
    """What one operation read, held and made in both traces."""
    if match.frame.source is not None:
        yield f"  {match.frame.source}"
    yield f"  {'A abs min  abs max':<19}  {'B abs min  abs max':<19}  difference"
    for pair in match.rows:
        a, b = (" ".join(f"{cell:>9}" for cell in _cells(row)) for row in (pair.a, pair.b))
        mark = "" if not pair.differs else "  <-"
        yield f"  {a}  {b}  {_rounded(pair.distance):>10}  {pair.a.label}{mark}"


def _counted(batches: Sequence[BatchDiff]) -> str:
    aligned = [match for batch in batches for match in batch.aligned]
    differing = sum(match.differs for match in aligned)
    compared = sum(match.compared for match in aligned)
    line = f"{differing} of {compared} compared frames differ"
    if len(batches) > 1:
        line += f" in {len(batches)} batches"
    if compared < len(aligned):
        line += f"; {len(aligned) - compared} have no numbers in one of the traces"
    return line


def _alone(batches: Sequence[BatchDiff]) -> Iterator[str]:
    """What has another name, and what is in one of the traces only."""
    aligned = [match for batch in batches for match in batch.aligned]
    renamed = [f"{m.frame.title} -> {m.renamed_to}" for m in aligned if m.renamed_to]
    only_in_a = [match.frame.title for batch in batches for match in batch.only_in_a]
    only_in_b = [match.frame.title for batch in batches for match in batch.only_in_b]
    for what, titles in (
        ("renamed", renamed),
        ("only in A", only_in_a),
        ("only in B", only_in_b),
    ):
        if titles:
            yield f"{what}: {_listed(titles)}"


def _why(match: Match, batch: BatchDiff) -> str:
    """What the first difference is made of."""
    if held := [pair.a.label for pair in match.of(RowRole.PARAMETER) if pair.differs]:
        return f"its {_listed(held)} differs already"
    read = [pair for pair in match.of(RowRole.INPUT) if pair.differs]
    if not read:
        return "the ranges of what it read agree, those of what it made do not"
    root = batch.aligned[-1] if batch.aligned else match
    given = [pair.a.label for pair in root.of(RowRole.INPUT) if pair.differs]
    if given and not root.frame.name:
        return f"the models were given something else: {_listed(given)}"
    labels = _listed([pair.a.label for pair in read])
    return f"what it read differs already: {labels}; nothing that could be compared made it so"


def _at(batch: BatchDiff) -> str:
    a, b = batch.a.number, batch.b.number
    return f", batch {a}" if a == b else f", batch {a} against {b}"


def _rounded(far: float | None) -> str:
    if far is None:
        return "-"
    return "0" if far == 0 else f"{far:.1e}"


def _cells(row: Row) -> tuple[str, str]:
    if row.abs_min is None or row.abs_max is None:
        return ("", row.note)
    return (f"{row.abs_min:.2e}", f"{row.abs_max:.2e}")


def _listed(names: Sequence[str], most: int = 5) -> str:
    """Some of the names, each once."""
    counted = [f"{name} ({n} times)" if n > 1 else name for name, n in Counter(names).items()]
    more = len(counted) - most
    return ", ".join(counted[:most]) + (f" and {more} more" if more > 0 else "")


def _sheet(batch: BatchDiff) -> Sheet:
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
        far = {id(pair.a): pair.distance for pair in match.rows}
        rows = match.frame.rows
        differences.append([_rounded(far[id(row)]) if id(row) in far else "" for row in rows])
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


def _plain(match: Match) -> dict[str, Any]:
    source = match.frame.source
    return {
        "operation": match.frame.title,
        "renamed_to": match.renamed_to,
        "source": None if source is None else {"file": source.file, "line": source.line},
        "difference": match.distance,
        "rows": [
            {
                "label": pair.a.label,
                "a": [pair.a.abs_min, pair.a.abs_max],
                "b": [pair.b.abs_min, pair.b.abs_max],
                "difference": pair.distance,
                "differs": pair.differs,
            }
            for pair in match.rows
        ],
    }
