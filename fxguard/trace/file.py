"""Reads trace files, which hold frames once and the numbers of each batch.

A file holds JSON lines. The first line identifies the file. A ``plan`` line lists frames with the
labels of their rows; it is written again only when a batch has other frames. A ``batch`` line holds
the numbers, the fingerprints, and which rows are masks. Files of earlier versions lack the latter
two, and earlier versions ignore them. Each line is written when its batch has finished, so that a
file is readable up to the point of a crash. Frames of the loss and of the backward follow in lines
of their own.
:mod:`fxguard.trace.writer` writes these files. Knows nothing of torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fxguard.errors import UsageError
from fxguard.records import BACKWARD, Frame, Row, Source
from fxguard.report.frames_json import (
    INFINITE,
    collector_paused,
    of_type,
    read_text,
)
from fxguard.trace.fingerprints import read_fingerprints
from fxguard.trace.trace import Trace, TracedBatch

__all__ = ["SCHEMA", "load_trace"]

_T = TypeVar("_T")

SCHEMA = 1  # version in the first line


def load_trace(path: str | Path, *, on_progress: Callable[[float], object] | None = None) -> Trace:
    """Read a file that ``trace_to`` wrote. Needs no torch, and executes nothing from the file.

    Args:
        path: path of the file.
        on_progress: called repeatedly with the share that was read, from 0 to 1.

    Raises:
        FxguardError: when it is not such a file, when it cannot be read, or when a line is damaged.
            A last line that was cut off is left out, and :attr:`Trace.cut` says so.
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
    """Add a line to the batches of a file: a new batch, or more frames of an earlier one."""
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
    given = entry.get("fingerprints")
    fingerprints = None if given is None else read_fingerprints(given, plan.row_count)
    masks = set(map(_int, _list(entry.get("masks", []))))
    frames: list[Frame] = []
    at = 0
    for name, kind, is_op, source, of_rows, phase in plan.frames:
        with_numbers = []
        for label, dtype in of_rows:
            row = _row(label, dtype, rows[at])
            if fingerprints is not None:
                row = replace(row, fingerprint=fingerprints[at])
            if at in masks:
                row = replace(row, mask=True)
            with_numbers.append(row)
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
        # Most rows are two numbers, and there are millions of rows.
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
        raise ValueError(f"a magnitude cannot be negative, got {value}")
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
