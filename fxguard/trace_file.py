"""Traces in files: which frames there are, once, and the numbers of each batch.

A file holds JSON lines. The first says what the file is; a ``plan`` line lists frames with the
labels of their rows, and is written again only when a batch has other frames; a ``batch`` line
holds the numbers. Each line is written when its batch has finished: what a crash leaves behind can
be read up to there. Knows nothing of torch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fxguard.errors import UsageError
from fxguard.records import Frame, Row, Source

__all__ = ["Trace", "TraceWriter", "TracedBatch", "load_trace"]

SCHEMA = 1
DIGITS = 6  # significant ones: float32 has seven, and the last is seldom of interest
INFINITE = {"nan": float("nan"), "inf": float("inf")}  # magnitudes: none is negative


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """One batch of a trace."""

    number: int
    frames: tuple[Frame, ...]
    optimizer_step: int | None = None  # steps made before; None where nobody said
    verdict: tuple[str, ...] = ()  # of a detection: its lines; () where the batch was well


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
        plan = _text_of(_plan(batch.frames))
        lines = []
        if plan not in self._plans:
            self._plans[plan] = len(self._plans)
            lines.append(f'{{"plan": {self._plans[plan]}, {plan[1:]}')
        entry: dict[str, Any] = {"batch": batch.number, "of_plan": self._plans[plan]}
        if batch.optimizer_step is not None:
            entry["optimizer_step"] = batch.optimizer_step
        if batch.verdict:
            entry["verdict"] = batch.verdict
        entry["rows"] = [_numbers(row) for frame in batch.frames for row in frame.rows]
        lines.append(_text_of(entry))
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
        file.write(_text_of(head) + "\n")
        return file


def _plan(frames: Sequence[Frame]) -> dict[str, Any]:
    sources: dict[Source, int] = {}
    listed = []
    for frame in frames:
        place = None
        if frame.source is not None:
            place = sources.setdefault(frame.source, len(sources))
        labels = [row.label for row in frame.rows]
        listed.append([frame.name, frame.kind, int(frame.is_op), place, labels])
    return {"sources": [[s.file, s.line, s.code] for s in sources], "frames": listed}


def _numbers(row: Row) -> Any:
    if row.abs_min is None or row.abs_max is None:
        return row.note or "None"
    return [_number(row.abs_min), _number(row.abs_max)]


def _number(value: float) -> float | str:
    rounded = float(f"{value:.{DIGITS}g}")
    return next((name for name, x in INFINITE.items() if str(x) == str(rounded)), rounded)


def _text_of(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


# Reading.


def load_trace(path: str | Path) -> Trace:
    """Read a file that ``trace_to`` wrote. Needs no torch, and runs nothing that is in the file.

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
    for name, kind, is_op, place, labels in _list(entry["frames"]):
        if place is not None and not 0 <= _int(place) < len(sources):
            raise ValueError(f"there is no source {place}")
        rows = tuple(Row(_str(label)) for label in _list(labels))
        source = None if place is None else sources[place]
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
            tuple(_row(row.label, next(rows)) for row in frame.rows),
            frame.source,
            number,
            index,
        )
        for index, frame in enumerate(plan)
    )
    step = entry.get("optimizer_step")
    verdict = tuple(map(_str, _list(entry.get("verdict", []))))
    return TracedBatch(number, frames, None if step is None else _int(step), verdict)


def _row(label: str, numbers: Any) -> Row:
    if isinstance(numbers, str):
        return Row(label, note=numbers)
    least, largest = (INFINITE[x] if isinstance(x, str) else _float(x) for x in _list(numbers))
    return Row(label, least, largest)


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
