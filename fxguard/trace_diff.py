"""Where two traces part. Knows nothing of torch."""

from __future__ import annotations

import html
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fxguard.align import align
from fxguard.errors import UsageError
from fxguard.formats import FORMATS
from fxguard.page import Sheet, page
from fxguard.records import Frame, Row
from fxguard.report import strict_json
from fxguard.trace_file import Trace, TracedBatch, load_trace

__all__ = ["BatchDiff", "Diff", "Match", "RowPair", "diff"]

# How far apart two magnitudes of the same operation may be, see `distance`: a few times what
# rounding made of them on the way through the models of the tests. A number that was rounded to a
# coarse dtype stays so: the coarsest of both traces counts.
TOLERANCES = {
    "float64": 1e-5,  # a trace file keeps six digits
    "complex128": 1e-5,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
COARSER = 0.5  # float8, and whatever else has few bits

SHOWN = 20  # rows in a notebook

Traced = Trace | TracedBatch | Sequence[Frame] | str | Path


@dataclass(frozen=True, slots=True)
class RowPair:
    """The same value in both traces."""

    a: Row
    b: Row
    distance: float | None  # see `distance`; None where one of them has no number
    differs: bool  # more than is tolerated


@dataclass(frozen=True, slots=True)
class Match:
    """One operation, or one call of a module, in both traces, or in one of them only."""

    a: Frame | None  # None where it is in the second trace only
    b: Frame | None
    rows: tuple[RowPair, ...] = ()

    @property
    def frame(self) -> Frame:
        """The first trace's, where it is there."""
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def renamed(self) -> bool:
        """Whether it has another name or kind in the second trace."""
        return self.a is not None and self.b is not None and self.a.title != self.b.title

    def of(self, what: Literal["input", "output", "weight"]) -> list[RowPair]:
        """What it read, made, or holds."""

        def kind(label: str) -> str:
            return next((k for k in ("input", "output") if label.startswith(k)), "weight")

        return [pair for pair in self.rows if kind(pair.a.label) == what]

    @property
    def distance(self) -> float:
        """How far apart is what it made."""
        return max((pair.distance or 0.0 for pair in self.of("output")), default=0.0)

    @property
    def differs(self) -> bool:
        """Whether it made something else, by more than is tolerated."""
        return any(pair.differs for pair in self.of("output"))

    @property
    def compared(self) -> bool:
        """Whether there are numbers to compare."""
        return any(pair.distance is not None for pair in self.of("output"))


@dataclass(frozen=True, slots=True)
class BatchDiff:
    """Two batches next to each other."""

    a: TracedBatch
    b: TracedBatch
    matches: tuple[Match, ...]  # in order; what is in one only stands where it would run

    @property
    def aligned(self) -> list[Match]:
        """What is in both."""
        return [match for match in self.matches if match.a is not None and match.b is not None]

    @property
    def differing(self) -> list[Match]:
        """What is in both and made something else."""
        return [match for match in self.matches if match.differs]

    def only(self, side: Literal["a", "b"]) -> list[Match]:
        """What is in one of them only."""
        return [m for m in self.matches if (m.b if side == "a" else m.a) is None]


@dataclass(frozen=True, slots=True)
class Diff:
    """Two traces next to each other: where they part.

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
        """Whether anything that is in both made something else."""
        return self.first is not None

    def _differing(self) -> Iterator[Match]:
        return (match for batch in self.batches for match in batch.differing)

    @property
    def verdict(self) -> list[str]:
        """Where they part, in lines."""
        found = next((batch for batch in self.batches if batch.differing), None)
        if found is None:
            same = "no difference" if self._compared else "nothing could be compared"
            return [f"{same}: {self._counted(self.batches)}", *self._alone(self.batches[:1])]
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
        return [*lines, self._counted(self.batches), *self._alone([found])]

    def __str__(self) -> str:
        return "\n".join([f"A: {self.a}", f"B: {self.b}", "", *self.verdict])

    @property
    def _compared(self) -> bool:
        return any(match.compared for batch in self.batches for match in batch.aligned)

    @staticmethod
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

    @staticmethod
    def _alone(batches: Sequence[BatchDiff]) -> Iterator[str]:
        for batch in batches:
            renamed = [f"{m.a.title} -> {m.b.title}" for m in batch.aligned if m.renamed]  # type: ignore[union-attr]
            if renamed:
                yield f"renamed: {_listed(renamed)}"
            for side in ("a", "b"):
                titles = [match.frame.title for match in batch.only(side)]  # type: ignore[arg-type]
                if titles:
                    yield f"only in {side.upper()}: {_listed(titles)}"

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """Every operation that differs as one table, a row for each value that it made.

        Args:
            tablefmt: any table format that tabulate knows.
            most: only so many rows, the first ones.
        """
        from tabulate import tabulate

        def escaped(text: str) -> str:
            return text.replace("|", r"\|") if tablefmt in ("github", "pipe") else text

        rows = [
            tuple(
                map(
                    escaped,
                    (
                        str(batch.a.number),
                        match.frame.title,
                        pair.a.label,
                        *_cells(pair.a),
                        *_cells(pair.b),
                        _percent(pair.distance),
                        str(match.frame.source or ""),
                    ),
                )
            )
            for batch in self.batches
            for match in batch.differing
            for pair in match.of("output")
            if pair.differs
        ]
        headers = (
            *("batch", "operation", "value", "A abs min", "A abs max"),
            *("B abs min", "B abs max", "difference", "source"),
        )
        return tabulate(rows[:most], headers=headers, tablefmt=tablefmt, disable_numparse=True)

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
                    "only_in_a": [match.frame.title for match in batch.only("a")],
                    "only_in_b": [match.frame.title for match in batch.only("b")],
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
            well=not self.differs,
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
    return Diff(name_a, name_b, tuple(_compare(x, y, tolerance) for x, y in pairs), tolerance)


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


# One batch.


def _compare(a: TracedBatch, b: TracedBatch, given: float | None) -> BatchDiff:
    tolerance = _rounding(a, b) if given is None else given

    def agree(x: Frame, y: Frame) -> bool:
        match = Match(x, y, tuple(_rows(x, y, tolerance)))
        return match.compared and not match.differs

    matches = []
    next_a = next_b = 0
    for i, j in [*align(a.frames, b.frames, agree), (len(a.frames), len(b.frames))]:
        matches += [Match(frame, None) for frame in a.frames[next_a:i]]
        matches += [Match(None, frame) for frame in b.frames[next_b:j]]
        if i < len(a.frames):
            x, y = a.frames[i], b.frames[j]
            matches.append(Match(x, y, tuple(_rows(x, y, tolerance))))
        next_a, next_b = i + 1, j + 1
    return BatchDiff(a, b, tuple(matches))


def _rounding(a: TracedBatch, b: TracedBatch) -> float:
    """What rounding to the coarsest dtype may make of a number."""
    dtypes = {row.dtype for batch in (a, b) for frame in batch.frames for row in frame.rows}
    inexact = [dtype for dtype in dtypes if "float" in dtype or "complex" in dtype]
    return max((TOLERANCES.get(d, COARSER) for d in inexact), default=TOLERANCES["float32"])


def _rows(x: Frame, y: Frame, tolerance: float) -> Iterator[RowPair]:
    """Rows by label; those that a graph numbers otherwise by order, where there are as many."""
    labels = {row.label: row for row in y.rows}
    for start in ("input", "output"):
        ours = [row for row in x.rows if row.label.startswith(start)]
        theirs = [row for row in y.rows if row.label.startswith(start)]
        if len(ours) == len(theirs):
            labels |= {own.label: other for own, other in zip(ours, theirs, strict=True)}
    for row in x.rows:
        if row.label in labels:
            yield _row_pair(row, labels[row.label], tolerance)


def _row_pair(a: Row, b: Row, tolerance: float) -> RowPair:
    far = distance(a, b)
    return RowPair(a, b, far, far is not None and far > tolerance)


def distance(a: Row, b: Row) -> float | None:
    """How far apart two ranges are: 0 for equal ones, 1 where one is many times the other.

    ``max(|a.max - b.max|, |a.min - b.min|) / max(a.max, b.max)``: the smallest magnitude of a
    large tensor is an accident, and counts as much as it is felt next to the largest. 0 also where
    both hold the largest number of their dtypes, which masks are made of. Infinite where one of
    them is worse than the other (finite < inf < NaN); None where one has no number.
    """
    low_a, high_a, low_b, high_b = a.abs_min, a.abs_max, b.abs_min, b.abs_max
    if low_a is None or high_a is None or low_b is None or high_b is None:
        return None
    if math.isnan(high_a) or math.isnan(high_b):
        return 0.0 if math.isnan(high_a) == math.isnan(high_b) else math.inf
    if high_a == high_b == math.inf or (_is_mask(a) and _is_mask(b)):
        return 0.0
    scale = max(high_a, high_b)
    if scale == math.inf:
        return math.inf
    return max(abs(high_a - high_b), abs(low_a - low_b)) / scale if scale else 0.0


def _is_mask(row: Row) -> bool:
    assert row.abs_max is not None
    limit = FORMATS.get(row.dtype)
    return limit is not None and math.isclose(row.abs_max, limit.max, rel_tol=1e-5)


# Text.


def _lines(match: Match) -> Iterator[str]:
    """What one operation read, held and made in both traces."""
    if match.frame.source is not None:
        yield f"  {match.frame.source}"
    yield f"  {'A abs min  abs max':<19}  {'B abs min  abs max':<19}  difference"
    for pair in match.rows:
        a, b = (" ".join(f"{cell:>9}" for cell in _cells(row)) for row in (pair.a, pair.b))
        mark = "" if not pair.differs else "  <-"
        yield f"  {a}  {b}  {_percent(pair.distance):>10}  {pair.a.label}{mark}"


def _why(match: Match, batch: BatchDiff) -> str:
    """What the first difference is made of."""
    if held := [pair.a.label for pair in match.of("weight") if pair.differs]:
        return f"its {_listed(held)} differs already"
    read = [pair for pair in match.of("input") if pair.differs]
    if not read:
        return "what it read is the same, what it made is not"
    root = batch.aligned[-1] if batch.aligned else match
    given = [pair.a.label for pair in root.of("input") if pair.differs]
    if given and not root.frame.name:
        return f"the models were given something else: {_listed(given)}"
    labels = _listed([pair.a.label for pair in read])
    return f"what it read differs already: {labels}, made by what is in one of the traces only"


def _at(batch: BatchDiff) -> str:
    a, b = batch.a.number, batch.b.number
    return f", batch {a}" if a == b else f", batch {a} against {b}"


def _percent(far: float | None) -> str:
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
    frames, other, notes = [], [], {}
    for index, match in enumerate(batch.matches):
        if match.a is None or match.b is None:
            notes[index] = f"only in {'A' if match.b is None else 'B'}"
        elif match.renamed:
            notes[index] = f"in B: {match.b.title}"
        ours, theirs = _side_by_side(match)
        frames.append(replace(match.frame, rows=ours))
        other.append(theirs)
    marked = frozenset(i for i, match in enumerate(batch.matches) if match.differs)
    a, b = batch.a.number, batch.b.number
    label = str(a) if a == b else f"{a} against {b}"
    return Sheet(label, frames, (), marked, other, notes)


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
        "renamed_to": match.b.title if match.renamed and match.b is not None else None,
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
