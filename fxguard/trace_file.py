"""Traces in files: which frames there are, once, and the numbers of each batch.

A file holds JSON lines. The first says what the file is; a ``plan`` line lists frames with the
labels of their rows, and is written again only when a batch has other frames; a ``batch`` line
holds the numbers. Each line is written when its batch has finished: what a crash leaves behind can
be read up to there. Knows nothing of torch.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from fxguard.compact import INFINITE, as_json, numbers_of, plan_of
from fxguard.errors import UsageError
from fxguard.formats import FORMATS
from fxguard.page import Sheet, page
from fxguard.plot import plot
from fxguard.records import Frame, Row, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Trace", "TraceWriter", "TracedBatch", "load_trace"]

_T = TypeVar("_T")

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """One batch of a trace."""

    number: int
    frames: tuple[Frame, ...]
    optimizer_step: int | None = None  # steps made before; None where nobody said
    verdict: tuple[str, ...] = ()  # of a detection: its lines; () where the batch was well
    blamed: tuple[int, ...] = ()  # of a detection: indices of the frames of its origins

    def sheet(self) -> Sheet:
        """The batch as it stands on a page."""
        step = "" if self.optimizer_step is None else f", optimizer step {self.optimizer_step}"
        label = f"{self.number}{step}"
        return Sheet(label, self.frames, self.verdict, frozenset(self.blamed))


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds.

    Example:
        >>> trace = fxguard.load_trace("traces/T5ForConditionalGeneration-0.jsonl")
        >>> [batch.number for batch in trace.batches]
        [149, 150]
    """

    model: str  # name of its class
    rank: int | None  # of the process that wrote it; None without a process group
    torch: str  # its version
    batches: tuple[TracedBatch, ...]
    cut: bool = False  # the last line is incomplete: the process ended while it wrote

    @property
    def verdict(self) -> list[str]:
        """What was found first; else whether results are finite, and what came nearest to not."""
        for batch in self.batches:
            if batch.verdict:
                return [f"batch {batch.number}: {batch.verdict[0]}", *batch.verdict[1:]]
        bad = [
            frame for batch in self.batches for frame in batch.frames if any(_made(frame, bad=True))
        ]
        returned = next((frame for frame in bad if not frame.name), None)
        if returned is not None:
            lines = [f"batch {returned.batch_number}: the model returned inf or NaN"]
        else:
            lines = ["the model returned finite numbers"]
        if bad:
            lines.append(f"{len(bad)} frames hold inf or NaN, the first is {_place(bad[0])}")
        return lines + _nearest(self.batches)

    @property
    def is_well(self) -> bool:
        """Whether nothing was found, and the model returned finite numbers."""
        return not any(
            batch.verdict or (not frame.name and any(_made(frame, bad=True)))
            for batch in self.batches
            for frame in batch.frames[-1:]
        )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: every frame of every batch, with a slider.

        Args:
            path: of the file; written over.

        Raises:
            FxguardError: when the trace has no batch.
        """
        if not self.batches:
            raise UsageError("a trace without a batch has nothing to show")
        sheets = [batch.sheet() for batch in self.batches]
        said = [f"{len(sheets)} batch" + ("es" if len(sheets) > 1 else ""), f"torch {self.torch}"]
        if self.rank is not None:
            said.append(f"rank {self.rank}")
        if self.cut:
            said.append("the file ends in the middle of a batch")
        text = page(self.model, self.verdict, sheets, meta=", ".join(said), well=self.is_well)
        Path(path).write_text(text, encoding="utf-8")

    def plot(self, batch_number: int | None = None, ax: Axes | None = None) -> Axes:
        """Draw the magnitudes of one batch over depth, with matplotlib.

        Args:
            batch_number: which batch; None for the first in which something was found, else the
                first.
            ax: where to; None makes a new figure.

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
            there = ", ".join(str(batch.number) for batch in self.batches) or "none"
            raise UsageError(f"there is no batch {batch_number} in this trace; it has {there}")
        return plot(wanted[0].frames, ax, f"{self.model}, batch {wanted[0].number}")

    def _repr_html_(self) -> str:
        from tabulate import tabulate

        rows = [
            (batch.number, len(batch.frames), *(batch.verdict or _nearest([batch]))[:1])
            for batch in self.batches
        ]
        table = tabulate(rows, headers=("batch", "frames", ""), tablefmt="html")
        text = html.escape("\n".join([self.model, *self.verdict]))
        return f"<pre>{text}</pre>{table}"


def _made(frame: Frame, *, bad: bool) -> Iterator[Row]:
    """The rows of what a frame made that hold a number, a bad one or a good one."""
    for row in frame.rows:
        if row.label.startswith("output") and row.abs_max is not None and row.is_bad == bad:
            yield row


def _place(frame: Frame) -> str:
    where = f" ({frame.source.place})" if frame.source else ""
    return f"{frame.title}, batch {frame.batch_number}{where}"


def _nearest(batches: Sequence[TracedBatch]) -> list[str]:
    """The operation that came nearest to the limit of its dtype, in lines."""
    found: list[tuple[float, Row, Frame]] = []
    for batch in batches:
        for frame in batch.frames:
            for row in _made(frame, bad=False):
                ratio = (
                    FORMATS[row.dtype].max / row.abs_max
                    if row.dtype in FORMATS and row.abs_max
                    else 0
                )
                if ratio > 1.00001:  # the largest number itself is what masks are made of
                    found.append((ratio, row, frame))
    if not found:
        return []
    ratio, row, frame = min(found, key=lambda each: each[0])
    return [
        f"nearest to its limit: {_place(frame)}",
        f"  it made {row.abs_max:.4g}; {row.dtype} holds {ratio:.3g} times that, "
        f"{math.log2(ratio):.1f} bits of headroom",
    ]


class TraceWriter:
    """Writes the batches of one guarded model into a file of its own.

    Args:
        folder: where to; made when the first batch is written.
        model: name of the model's class.
        torch: its version.
    """

    def __init__(self, folder: Path, model: str, torch: str) -> None:
        self.folder, self.model, self.torch = folder, model, torch
        self.path: Path | None = None  # once there is a file
        self._plans: dict[str, int] = {}  # as it stands in the file: its number

    def write(self, batch: TracedBatch, rank: int | None) -> None:
        """Add a batch to the file.

        Args:
            batch: with all of its frames.
            rank: of this process, None without a process group.
        """
        plan = as_json(plan_of(batch.frames))
        lines = []
        if plan not in self._plans:
            self._plans[plan] = len(self._plans)
            lines.append(f'{{"plan": {self._plans[plan]}, {plan[1:]}')
        entry: dict[str, Any] = {"batch": batch.number, "of_plan": self._plans[plan]}
        if batch.optimizer_step is not None:
            entry["optimizer_step"] = batch.optimizer_step
        if batch.verdict:
            entry["verdict"] = batch.verdict
            entry["blamed"] = batch.blamed
        entry["rows"] = numbers_of([row for frame in batch.frames for row in frame.rows])
        lines.append(as_json(entry))
        with self._opened(rank) as file:
            file.write("\n".join(lines) + "\n")

    def _opened(self, rank: int | None) -> TextIO:
        if self.path is not None:
            return self.path.open("a", encoding="utf-8")
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if rank is None else f"-rank{rank}"
        for number in itertools.count():
            path = self.folder / f"{self.model}-{number}{suffix}.jsonl"
            try:
                file = path.open("x", encoding="utf-8")  # nothing is written over
            except FileExistsError:
                continue
            break
        self.path = path
        head = {"fxguard_trace": SCHEMA, "model": self.model, "rank": rank, "torch": self.torch}
        file.write(as_json(head) + "\n")
        return file


# Reading.


def load_trace(path: str | Path, *, on_progress: Callable[[float], object] | None = None) -> Trace:
    """Read a file that ``trace_to`` wrote. Needs no torch, and runs nothing that is in the file.

    Args:
        path: of the file.
        on_progress: is called again and again with the share that was read, from 0 to 1.

    Raises:
        FxguardError: when it is not such a file, or a line of it is damaged. A last line that
            was cut off is left out, and :attr:`Trace.cut` says so.
        OSError: when there is no such file.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    cut = lines[-1] != ""
    plans: dict[int, list[Frame]] = {}
    batches = []
    head: dict[str, Any] | None = None
    for number, line in enumerate(lines[:-1], 1):
        if on_progress is not None:
            on_progress(number / len(lines))
        try:
            entry = _dict(json.loads(line))
            if head is None:
                head = _head(entry)
            elif "plan" in entry:
                plans[_int(entry["plan"])] = list(_frames(entry))
            else:
                batches.append(_batch(entry, plans))
        except (ValueError, KeyError, IndexError, RecursionError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}:{number}: not a trace of fxguard: {what}") from error
    if head is None:
        raise UsageError(f"{path}: not a trace of fxguard: it is empty")
    return Trace(head["model"], head["rank"], head["torch"], tuple(batches), cut)


def _head(entry: dict[str, Any]) -> dict[str, Any]:
    schema = entry.get("fxguard_trace")
    if schema != SCHEMA:
        raise ValueError(
            f"schema {schema!r}, and this version of fxguard reads {SCHEMA}"
            if schema is not None
            else "the first line does not say that it is one"
        )
    rank = entry["rank"]
    return {
        "model": _str(entry["model"]),
        "rank": None if rank is None else _int(rank),
        "torch": _str(entry["torch"]),
    }


def _frames(entry: dict[str, Any]) -> Iterator[Frame]:
    sources = [Source(_str(f), _int(line), _str(code)) for f, line, code in _list(entry["sources"])]
    dtypes = list(map(_str, _list(entry["dtypes"])))
    for name, kind, is_op, place, labels, of_rows in _list(entry["frames"]):
        rows = tuple(
            Row(_str(label), dtype=_at(dtypes, dtype, "dtype"))
            for label, dtype in zip(_list(labels), _list(of_rows), strict=True)
        )
        source = None if place is None else _at(sources, place, "source")
        yield Frame(_str(name), _str(kind), bool(_int(is_op)), rows, source)


def _batch(entry: dict[str, Any], plans: dict[int, list[Frame]]) -> TracedBatch:
    number, rows = _int(entry["batch"]), iter(_list(entry["rows"]))
    plan = plans[_int(entry["of_plan"])]
    if len(entry["rows"]) != sum(len(frame.rows) for frame in plan):
        raise ValueError("a batch has other rows than its plan")
    frames = tuple(
        Frame(
            frame.name,
            frame.kind,
            frame.is_op,
            tuple(_row(row, next(rows)) for row in frame.rows),
            frame.source,
            number,
            index,
        )
        for index, frame in enumerate(plan)
    )
    step = entry.get("optimizer_step")
    verdict = tuple(map(_str, _list(entry.get("verdict", []))))
    blamed = tuple(map(_int, _list(entry.get("blamed", []))))
    for index in blamed:
        _at(frames, index, "frame")
    return TracedBatch(number, frames, None if step is None else _int(step), verdict, blamed)


def _row(row: Row, numbers: Any) -> Row:
    if isinstance(numbers, str):
        return replace(row, note=numbers)
    least, largest = (INFINITE[x] if isinstance(x, str) else _float(x) for x in _list(numbers))
    return replace(row, abs_min=least, abs_max=largest)


def _at(listed: Sequence[_T], index: int, what: str) -> _T:
    if not 0 <= _int(index) < len(listed):
        raise ValueError(f"there is no {what} {index}")
    return listed[index]


def _of_type(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} is not of type {kinds[0].__name__}")
    return value


def _dict(value: Any) -> dict[str, Any]:
    return _of_type(value, dict)  # type: ignore[no-any-return]


def _list(value: Any) -> list[Any]:
    return _of_type(value, list)  # type: ignore[no-any-return]


def _str(value: Any) -> str:
    return _of_type(value, str)  # type: ignore[no-any-return]


def _int(value: Any) -> int:
    return _of_type(value, int)  # type: ignore[no-any-return]


def _float(value: Any) -> float:
    return float(_of_type(value, float, int))
