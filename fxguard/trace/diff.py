"""Where two traces diverge. Knows nothing of torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.records import Frame
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.in_words import names_text
from fxguard.report.page import page
from fxguard.report.strict_json import recorded, strict_json
from fxguard.trace._diff_page import sheet_of
from fxguard.trace.batch_diff import BatchDiff, Match, compare_batches, ranked
from fxguard.trace.diff_text import table, verdict_lines
from fxguard.trace.file import load_trace
from fxguard.trace.trace import Trace, TracedBatch

__all__ = ["Diff", "Traced", "compare_traces"]

Traced = Trace | TracedBatch | Sequence[Frame] | str | Path


@dataclass(frozen=True, slots=True)
class Diff(Displayed):
    """The comparison of two traces: where they diverge.

    It compares ranges, the smallest and largest magnitude of each tensor, and fingerprints if both
    traces have them: mean, norm, and two sums of the elements with seeded signs. Trace files have
    fingerprints; files of earlier versions, and frames that were never in a file, have none. The
    verdict says what was compared. Tensors with equal ranges may have different elements, such as
    the same ones in another order. If their fingerprints agree as well, different elements are
    unlikely but not impossible: two swapped elements of a large tensor are below the tolerance.

    Example:
        >>> found = fxguard.diff("traces/before.jsonl", "traces/after.jsonl")
        >>> if found.first is not None:
        ...     print(found)
    """

    a: str  # name of the first trace: its path, or its model's class
    b: str
    batches: tuple[BatchDiff, ...]  # at least one
    tolerance: float | None = None  # None: by dtype
    history: str | None = None  # folder of the history that says what is usual; None without one

    @property
    def first(self) -> Match | None:
        """The first operation whose outputs differ; None if there is none."""
        return next(self._differing(), None)

    @property
    def largest(self) -> Match | None:
        """The operation with the largest difference, the first of several."""
        return max(self._differing(), key=lambda match: match.distance, default=None)

    @property
    def ranked(self) -> list[Match]:
        """The operations that differ, those with the most times their usual change first.

        Operations of which no history says what is usual come last, in order of execution.
        """
        return [match for _, match in ranked(self.batches)]

    @property
    def differs(self) -> bool:
        """Whether any operation in both traces made values of different ranges or fingerprints."""
        return self.first is not None

    @property
    def compared(self) -> int:
        """How many frames have numbers in both traces."""
        return sum(match.compared for batch in self.batches for match in batch.aligned)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and all compared ranges and fingerprints agree."""
        return self.compared > 0 and not self.differs

    def _differing(self) -> Iterator[Match]:
        return (match for batch in self.batches for match in batch.differing)

    @property
    def verdict(self) -> list[str]:
        """Where the traces diverge, in lines."""
        return verdict_lines(self.batches, self.history)

    def __str__(self) -> str:
        return "\n".join([*self._sides, "", *self.verdict])

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """Every operation that differs, as one table with a row for each value that it made.

        The rows are in order of execution; with a history, in that of :attr:`ranked`.

        Args:
            tablefmt: any table format that tabulate knows.
            most: the number of rows to show, from the first one on.
        """
        return table(self.batches, tablefmt, most, with_usual=self.history is not None)

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain dicts, lists, strings and numbers."""
        data = {
            "a": self.a,
            "b": self.b,
            "tolerance": self.tolerance,
            "history": self.history,
            "differs": self.differs,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "batches": [
                {
                    "batch_a": batch.a.number,
                    "batch_b": batch.b.number,
                    "aligned": len(batch.aligned),
                    "compared": sum(match.compared for match in batch.aligned),
                    "only_in_a": [match.frame.title for match in batch.only_in_a],
                    "only_in_b": [match.frame.title for match in batch.only_in_b],
                    "differing": [_match_data(match) for match in batch.differing],
                }
                for batch in self.batches
            ],
        }
        return recorded("diff", data)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: where the traces diverge, and both curves.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        return page(
            "Where two traces part" if self.differs else "Two traces",
            self.verdict,
            [sheet_of(batch) for batch in self.batches],
            meta=f"A: {self.a}; B: {self.b}",
            healthy=self.agrees,
            sides=(self.a, self.b),
            opens=next((i for i, batch in enumerate(self.batches) if batch.differing), 0),
        )

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.agrees,
            above=self._sides,
            table=(lambda: self.to_table("html", SHOWN)) if self.differs else None,
            of_table="What differs, as a table",
            page=self._page,
            rows=sum(
                len(frame.rows)
                for batch in self.batches
                for frame in (*batch.a.frames, *batch.b.frames)
            ),
            name="diff",
        )

    @property
    def _sides(self) -> list[str]:
        return [f"A: {self.a}", f"B: {self.b}"]

    def to_json(self, indent: int | None = None) -> str:
        """The differences as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)


def compare_traces(a: Traced, b: Traced, tolerance: float | None = None) -> Diff:
    """Compare two traces, operation by operation; see :func:`fxguard.diff`."""
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"tolerance has to be 0 or more, got {tolerance!r}")
    name_a, batches_a = _read(a)
    name_b, batches_b = _read(b)
    pairs = _paired(batches_a, batches_b)
    return Diff(
        name_a, name_b, tuple(compare_batches(x, y, tolerance) for x, y in pairs), tolerance
    )


def _read(traced: Traced) -> tuple[str, Sequence[TracedBatch]]:
    """The name of a trace, and its batches."""
    if isinstance(traced, (str, Path)):
        return str(traced), load_trace(traced).batches
    if isinstance(traced, Trace):
        return traced.model, traced.batches
    batch = traced if isinstance(traced, TracedBatch) else _as_batch(traced)
    last = batch.root or next(reversed(batch.frames), None)
    return f"{'nothing' if last is None else last.kind}, batch {batch.number}", [batch]


def _as_batch(traced: Any) -> TracedBatch:
    frames = tuple(traced) if isinstance(traced, Iterable) else None
    if frames is None or not all(isinstance(frame, Frame) for frame in frames):
        raise UsageError(
            f"diff takes traces, batches of traces, files or lists of frames, got {traced!r}"
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
        numbers = (names_text([str(batch.number) for batch in batches]) for batches in (a, b))
        raise UsageError("no batch is in both traces: one has {}, the other {}".format(*numbers))
    return pairs


def _match_data(match: Match) -> dict[str, Any]:
    source = match.frame.source
    return {
        "operation": match.frame.title,
        "renamed_to": match.renamed_to,
        "source": None if source is None else {"file": source.file, "line": source.line},
        "difference": match.distance,
        "usual": None if match.usual is None else match.usual.to_dict(),
        "rows": [
            {
                "label": pair.a.label,
                "a": [pair.a.abs_min, pair.a.abs_max],
                "b": [pair.b.abs_min, pair.b.abs_max],
                "difference": pair.distance,
                "difference_of_elements": pair.elements,
                "differs": pair.differs,
            }
            for pair in match.rows
        ],
    }
