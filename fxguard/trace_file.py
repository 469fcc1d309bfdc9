"""Traces in files: which frames there are, once, and the numbers of each batch.

A file holds JSON lines. The first says what the file is; a ``plan`` line lists frames with the
labels of their rows, and is written again only when a batch has other frames; a ``batch`` line
holds the numbers. Each line is written when its batch has finished: what a crash leaves behind can
be read up to there. Knows nothing of torch.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fxguard.compact import INFINITE, as_json, numbers_of, of_type, plan_of
from fxguard.errors import UsageError
from fxguard.records import Frame, Row, Source
from fxguard.traces import Trace, TracedBatch

__all__ = ["TraceWriter", "load_trace"]

_T = TypeVar("_T")

SCHEMA = 1


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
        self._lock = threading.Lock()  # a model may be called in several threads

    def write(self, batch: TracedBatch, rank: int | None) -> None:
        """Add a batch to the file.

        Args:
            batch: with all of its frames.
            rank: of this process, None without a process group.
        """
        with self._lock:
            self._write(batch, rank)

    def _write(self, batch: TracedBatch, rank: int | None) -> None:
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


def _dict(value: Any) -> dict[str, Any]:
    return of_type(value, dict)  # type: ignore[no-any-return]


def _list(value: Any) -> list[Any]:
    return of_type(value, list)  # type: ignore[no-any-return]


def _str(value: Any) -> str:
    return of_type(value, str)  # type: ignore[no-any-return]


def _int(value: Any) -> int:
    return of_type(value, int)  # type: ignore[no-any-return]


def _float(value: Any) -> float:
    if of_type(value, float, int) < 0:
        raise ValueError(f"a magnitude is not negative, and {value} is")
    return float(value)
