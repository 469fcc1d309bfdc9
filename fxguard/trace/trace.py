"""The batches of a trace, and the verdict on them. Knows nothing of torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxguard.errors import UsageError
from fxguard.formats import FORMATS
from fxguard.records import Frame
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.headroom import nearest
from fxguard.report.page import page
from fxguard.report.plot import plot
from fxguard.report.sheet import Sheet
from fxguard.report.strict_json import plain_data, recorded, strict_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Trace", "TracedBatch", "place_of"]


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """One batch of a trace."""

    number: int
    frames: tuple[Frame, ...]
    optimizer_step: int | None = None  # steps made before; None if unknown
    verdict: tuple[str, ...] = ()  # lines of a detection; () if the batch was healthy
    blamed: tuple[int, ...] = ()  # indices of the frames of a detection's origins

    @property
    def returned_bad(self) -> bool:
        """Whether the model returned an inf or a NaN."""
        root = self.root
        return root is not None and root.made_bad

    @property
    def root(self) -> Frame | None:
        """The frame of the model; None if its forward raised."""
        forward = [frame for frame in self.frames if frame.phase == "forward"]
        last = forward[-1] if forward else None
        return None if last is None or last.name or last.is_op else last

    def sheet(self) -> Sheet:
        """The batch as a page shows it."""
        step = "" if self.optimizer_step is None else f", optimizer step {self.optimizer_step}"
        label = f"{self.number}{step}"
        looked_at = self.blamed
        if not looked_at and self.returned_bad:
            looked_at = tuple(i for i, frame in enumerate(self.frames) if frame.made_bad)
        return Sheet(
            label,
            self.frames,
            verdict=self.verdict,
            marked=frozenset(self.blamed),
            cause=next(iter(looked_at), None),
        )


@dataclass(frozen=True, slots=True)
class Trace(Displayed):
    """The contents of a trace file.

    Example:
        >>> trace = fxguard.load_trace("traces/T5ForConditionalGeneration-0.jsonl")
        >>> [batch.number for batch in trace.batches]
        [149, 150]
    """

    model: str  # name of its class
    rank: int | None  # rank of the process that wrote it; None without a process group
    torch: str  # its version
    batches: tuple[TracedBatch, ...]
    cut: bool = False  # the last line is incomplete: the process ended while writing

    @property
    def verdict(self) -> list[str]:
        """The first detection; without one, whether outputs are finite, and the least headroom."""
        for batch in self.batches:
            if batch.verdict:
                return [f"batch {batch.number}: {batch.verdict[0]}", *batch.verdict[1:]]
        bad = [frame for batch in self.batches for frame in batch.frames if frame.made_bad]
        returned = next((batch for batch in self.batches if batch.returned_bad), None)
        if returned is not None:
            lines = [f"batch {returned.number}: the model returned inf or NaN"]
        else:
            lines = ["the model returned finite numbers"]
        if bad:
            hold = "frame holds" if len(bad) == 1 else "frames hold"
            lines.append(f"{len(bad)} {hold} inf or NaN, the first is {place_of(bad[0])}")
        return lines + _nearest_lines(self.batches)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found, and the model returned finite numbers."""
        return not any(batch.verdict or batch.returned_bad for batch in self.batches)

    def __str__(self) -> str:
        return "\n".join([self.model, "", *self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain dicts, lists, strings and numbers, with its verdict."""
        data = {**plain_data(self), "healthy": self.is_healthy, "verdict": self.verdict}
        return recorded("batches", data)

    def to_json(self, indent: int | None = None) -> str:
        """The trace as strict JSON: NaN and infinities are the strings "nan" and "inf".

        It is one record, and not the trace file, which is shorter and which ``load_trace`` reads.
        """
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: every frame of every batch, with a slider.

        Args:
            path: path of the file; overwritten if it exists.

        Raises:
            FxguardError: when the trace has no batch.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        if not self.batches:
            raise UsageError("a trace without a batch has nothing to show")
        sheets = [batch.sheet() for batch in self.batches]
        meta = [f"{len(sheets)} batch" + ("es" if len(sheets) > 1 else ""), f"torch {self.torch}"]
        if self.rank is not None:
            meta.append(f"rank {self.rank}")
        if self.cut:
            meta.append("the file ends in the middle of a batch")
        return page(
            self.model,
            self.verdict,
            sheets,
            meta=", ".join(meta),
            healthy=self.is_healthy,
            opens=self._of_verdict(),
        )

    def _of_verdict(self) -> int:
        """The index of the batch that the verdict names first."""
        found = [index for index, batch in enumerate(self.batches) if batch.verdict]
        bad = [index for index, batch in enumerate(self.batches) if batch.returned_bad]
        return (found or bad or [0])[0]

    def plot(self, batch_number: int | None = None, ax: Axes | None = None) -> Axes:
        """Draw the magnitudes of one batch over depth, with matplotlib.

        Args:
            batch_number: which batch; None for the first one with a detection, or else the first
                one.
            ax: where to draw; None makes a new figure.

        Returns:
            The axes; ``ax.figure.savefig("ranges.png")`` writes them.

        Raises:
            FxguardError: when there is no such batch, or no matplotlib.

        Example:
            >>> ax = fxguard.load_trace("traces/T5ForConditionalGeneration-0.jsonl").plot(149)
        """
        wanted = [
            batch
            for batch in sorted(self.batches, key=lambda each: not each.verdict)
            if batch_number is None or batch.number == batch_number
        ]
        if not wanted:
            numbers = ", ".join(str(batch.number) for batch in self.batches) or "none"
            raise UsageError(f"there is no batch {batch_number} in this trace; it has {numbers}")
        return plot(wanted[0].frames, ax, f"{self.model}, batch {wanted[0].number}")

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.is_healthy,
            above=[self.model],
            table=self._table,
            of_table="The batches as a table",
            page=self._page if self.batches else None,
            rows=sum(len(frame.rows) for batch in self.batches for frame in batch.frames),
            name="trace",
        )

    def _table(self) -> str:
        """The batches around the one of the verdict."""
        from tabulate import tabulate

        start = max(self._of_verdict() - SHOWN // 2, 0)
        rows = [
            (batch.number, len(batch.frames), *(batch.verdict or _nearest_lines([batch]))[:1])
            for batch in self.batches[start : start + SHOWN]
        ]
        return tabulate(rows, headers=("batch", "frames", ""), tablefmt="html")


def place_of(frame: Frame) -> str:
    """``log, batch 1 (train.py:6)``."""
    where = f" ({frame.source.place})" if frame.source else ""
    return f"{frame.title}, batch {frame.batch_number}{where}"


def _nearest_lines(batches: Sequence[TracedBatch]) -> list[str]:
    """The operation that came closest to the limit of its dtype."""
    closest = nearest(frame for batch in batches for frame in batch.frames)
    if closest is None:
        return []
    largest, dtype = closest.largest, closest.row.dtype
    return [
        f"nearest to its limit: {place_of(closest.frame)}",
        f"  it made {largest:.4g}; {dtype} holds {FORMATS[dtype].max / largest:.3g} times that, "
        f"{closest.bits:.1f} bits of headroom",
    ]
