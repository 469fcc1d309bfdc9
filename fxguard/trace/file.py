"""Traces in files: which frames there are, once, and the numbers of each batch.

A file holds JSON lines. The first says what the file is; a ``plan`` line lists frames with the
labels of their rows, and is written again only when a batch has other frames; a ``batch`` line
holds the numbers. Each line is written when its batch has finished, so that a file is readable up
to the point of a crash. The frames of its loss and of its backward come later, in lines of their
own. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fxguard.errors import UsageError
from fxguard.records import BACKWARD, Frame, Row, Source
from fxguard.report.frames_json import (
    INFINITE,
    as_json,
    collector_paused,
    layout_of,
    numbers_of,
    of_type,
    read_text,
)
from fxguard.trace.trace import Trace, TracedBatch

__all__ = ["TraceWriter", "load_trace"]

_T = TypeVar("_T")

SCHEMA = 1
LONGEST = 50  # characters of a class name in a file name, which has at most 255 bytes


class TraceWriter:
    """Writes the batches of one guarded model into a file of its own.

    A batch is in the file as a whole or not at all. If it cannot be written, the batches before it
    stay readable, and the next batch is tried again. Threads write one after the other. A forked
    process writes a file of its own.

    Args:
        folder: where to; made when the first batch is written.
        model: name of the model's class.
        torch: its version.
    """

    def __init__(self, folder: Path, model: str, torch: str) -> None:
        self.folder, self.model, self.torch = folder, model, torch
        self._begin()
        self.lock = threading.Lock()  # a model may be called in several threads
        _writers.add(self)

    def _begin(self) -> None:
        """There is no file yet."""
        self.path: Path | None = None  # once a batch is in it
        self._size = 0  # of what was written whole, in bytes
        self._plans: dict[str, int] = {}  # as it stands in the file: its number

    def after_fork(self) -> None:
        """The file is the parent's, and a thread of it may have had the lock."""
        self._begin()
        self.lock = threading.Lock()

    def write(self, batch: TracedBatch, rank: int | None, *, is_later: bool = False) -> None:
        """Add a batch to the file.

        Args:
            batch: with all of its frames.
            rank: of this process, None without a process group.
            is_later: whether these frames belong to a batch of that number that is there already.

        Raises:
            OSError: when that is not possible; the file is what it was.
        """
        with self.lock:
            self._write(batch, rank, is_later)

    def _write(self, batch: TracedBatch, rank: int | None, is_later: bool) -> None:
        plan = as_json(layout_of(batch.frames))
        lines = []
        if self._is_gone():
            self._begin()
        if self.path is None:
            head = {"fxguard_trace": SCHEMA, "model": self.model, "rank": rank, "torch": self.torch}
            lines.append(as_json(head))
        of_plan = self._plans.get(plan, len(self._plans))
        if of_plan == len(self._plans):
            lines.append(f'{{"plan": {of_plan}, {plan[1:]}')
        entry: dict[str, Any] = {"batch": batch.number, "of_plan": of_plan}
        if is_later:
            entry["later"] = 1
        if batch.optimizer_step is not None:
            entry["optimizer_step"] = batch.optimizer_step
        if batch.verdict:
            entry["verdict"] = batch.verdict
            entry["blamed"] = batch.blamed
        entry["rows"] = numbers_of([row for frame in batch.frames for row in frame.rows])
        lines.append(as_json(entry))
        self._append("".join(f"{line}\n" for line in lines).encode(), rank)
        self._plans[plan] = of_plan

    def _is_gone(self) -> bool:
        """Whether somebody else has taken the file away, or a part of it."""
        try:
            return self.path is not None and self.path.stat().st_size < self._size
        except OSError:
            return True

    def _append(self, text: bytes, rank: int | None) -> None:
        """Write all of it, or leave the file as it was."""
        path = self._new_file(rank) if self.path is None else self.path
        try:
            with path.open("r+b") as file:
                file.truncate(self._size)  # what an earlier try may have left
                file.seek(self._size)
                file.write(text)
            self.path, self._size = path, self._size + len(text)
        except BaseException:  # also an interrupt
            with contextlib.suppress(OSError):
                if self.path is None:
                    path.unlink()
                else:
                    os.truncate(path, self._size)
            raise

    def _new_file(self, rank: int | None) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if rank is None else f"-rank{rank}"
        # A class may have any name: none leads out of the folder, or is too long for it.
        name = re.sub(r"[^\w.-]", "_", self.model)[:LONGEST].strip(".") or "model"
        for number in itertools.count():
            path = self.folder / f"{name}-{number}{suffix}.jsonl"
            with contextlib.suppress(FileExistsError):
                path.open("xb").close()  # nothing is written over
                return path
        raise AssertionError  # it counts for ever


_writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _writers:
        writer.after_fork()


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_after_fork)


# Reading.


def load_trace(path: str | Path, *, on_progress: Callable[[float], object] | None = None) -> Trace:
    """Read a file that ``trace_to`` wrote. Needs no torch, and runs nothing that is in the file.

    Args:
        path: of the file.
        on_progress: is called again and again with the share that was read, from 0 to 1.

    Raises:
        FxguardError: when it is not such a file, or a line of it is damaged. A last line that
            was cut off is left out, and :attr:`Trace.cut` says so. Also where it cannot be read.
        OSError: when there is no such file.
    """
    with collector_paused():
        return _read(Path(path), on_progress)


def _read(path: Path, on_progress: Callable[[float], object] | None) -> Trace:
    lines = read_text(path).split("\n")
    cut = lines[-1] != ""
    plans: dict[int, Layout] = {}
    batches: list[TracedBatch] = []
    head: dict[str, Any] | None = None
    for number, line in enumerate(lines[:-1], 1):
        if on_progress is not None:
            on_progress(number / len(lines))
        try:
            entry = _dict(json.loads(line))
            if head is None:
                head = _head(entry)
            elif "plan" in entry:
                plans[_int(entry["plan"])] = _layout(entry)
            else:
                _add(batches, _batch(entry, plans), is_later="later" in entry)
        except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}:{number}: not a trace of fxguard: {what}") from error
    if head is None:
        raise UsageError(f"{path}: not a trace of fxguard: it is empty")
    return Trace(head["model"], head["rank"], head["torch"], tuple(batches), cut)


def _head(entry: dict[str, Any]) -> dict[str, Any]:
    schema = entry.get("fxguard_trace")
    if schema != SCHEMA:
        raise ValueError(
            f"schema {str(schema)[:40]}, and this version of fxguard reads {SCHEMA}"
            if schema is not None
            else "the first line does not say that it is one"
        )
    rank = entry["rank"]
    return {
        "model": _str(entry["model"]),
        "rank": None if rank is None else _int(rank),
        "torch": _str(entry["torch"]),
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """The frames of a batch without their numbers: a ``plan`` line of the file."""

    # Name, kind, whether it is an operation, source, label and dtype of each row, and phase.
    frames: tuple[tuple[str, str, bool, Source | None, list[tuple[str, str]], str], ...]
    row_count: int


def _layout(entry: dict[str, Any]) -> Layout:
    sources = []
    for listed in _list(entry["sources"]):
        file, line, code = _list(listed, 3)
        sources.append(Source(_str(file), _int(line), _str(code)))
    dtypes = list(map(_str, _list(entry["dtypes"])))
    frames = []
    for listed in _list(entry["frames"]):
        name, kind, is_op, place, labels, of_rows, *phases = _list(listed)
        phase = _str(_list(phases, 1)[0]) if phases else "forward"
        rows = [
            (_str(label), _at(dtypes, dtype, "dtype"))
            for label, dtype in zip(_list(labels), _list(of_rows), strict=True)
        ]
        source = None if place is None else _at(sources, place, "source")
        bare = _str(kind).removesuffix(BACKWARD) if phase == "backward" else _str(kind)
        frames.append((_str(name), bare, bool(_int(is_op)), source, rows, phase))
    return Layout(tuple(frames), sum(len(rows) for *_, rows, _ in frames))


def _add(batches: list[TracedBatch], batch: TracedBatch, *, is_later: bool) -> None:
    """Add what a line says to the batches of a file: another one, or more frames of one of them."""
    places = [i for i, known in enumerate(batches) if is_later and known.number == batch.number]
    if not places:
        batches.append(batch)
        return
    known = batches[places[-1]]
    first = len(known.frames)
    more = (replace(frame, index=first + frame.index) for frame in batch.frames)
    batches[places[-1]] = replace(known, frames=(*known.frames, *more))


def _batch(entry: dict[str, Any], plans: dict[int, Layout]) -> TracedBatch:
    number, rows = _int(entry["batch"]), _list(entry["rows"])
    plan = plans[_int(entry["of_plan"])]
    if len(rows) != plan.row_count:
        raise ValueError("a batch has other rows than its plan")
    frames: list[Frame] = []
    at = 0
    for name, kind, is_op, source, of_rows, phase in plan.frames:
        with_numbers = []
        for label, dtype in of_rows:
            with_numbers.append(_row(label, dtype, rows[at]))
            at += 1
        rows_of_frame, index = tuple(with_numbers), len(frames)
        frames.append(Frame(name, kind, is_op, rows_of_frame, source, number, index, phase))
    step = entry.get("optimizer_step")
    verdict = tuple(map(_str, _list(entry.get("verdict", []))))
    blamed = tuple(map(_int, _list(entry.get("blamed", []))))
    for index in blamed:
        _at(frames, index, "frame")
    return TracedBatch(number, tuple(frames), None if step is None else _int(step), verdict, blamed)


def _row(label: str, dtype: str, numbers: Any) -> Row:
    if type(numbers) is list and len(numbers) == 2:
        least, largest = numbers
        # Most are two numbers, and there are millions of them.
        if type(least) is float and type(largest) is float and least >= 0 and largest >= 0:
            return Row(label, least, largest, "", dtype)
    if isinstance(numbers, str):
        return Row(label, None, None, numbers, dtype)
    least, largest = map(_magnitude, _list(numbers, 2))
    return Row(label, least, largest, "", dtype)


def _magnitude(value: Any) -> float:
    if isinstance(value, str):
        return INFINITE[value]
    number = float(of_type(value, float, int))
    if number < 0:
        raise ValueError(f"a magnitude is not negative, and {value} is")
    return number


def _at(listed: Sequence[_T], index: int, what: str) -> _T:
    if not 0 <= _int(index) < len(listed):
        raise ValueError(f"there is no {what} {index}")
    return listed[index]


def _dict(value: Any) -> dict[str, Any]:
    return of_type(value, dict)  # type: ignore[no-any-return]


def _list(value: Any, length: int | None = None) -> list[Any]:
    items: list[Any] = of_type(value, list)
    if length is not None and len(items) != length:
        raise ValueError(f"{len(items)} items where there are {length}")
    return items


def _str(value: Any) -> str:
    return of_type(value, str)  # type: ignore[no-any-return]


def _int(value: Any) -> int:
    return of_type(value, int)  # type: ignore[no-any-return]
