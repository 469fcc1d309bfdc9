"""The open stretch of a history: a file that grows row by row, and may end anywhere.

Records follow each other, each with its kind, its length and a checksum. What stands behind the
first record that is not whole has been cut off by a crash, and is left out. Bytes are little
endian.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.history._series import Row, Series
from fxguard.report.frames_json import of_type

__all__ = ["SCHEMA", "Stream", "glance", "head", "read_stream", "row", "series"]

SCHEMA = 1  # of a whole folder: in the head of each stream and in meta.json

HEAD, SERIES, ROW = 1, 2, 3  # kinds of records
BEGIN = struct.Struct("<BII")  # of a record: kind, length of the rest, its checksum
BEGIN_ROW = struct.Struct("<qI")  # of the rest of a row: step, number of series
NAN = array("d", [float("nan")])
IS_LITTLE = sys.byteorder == "little"


def head(run: int, rank: int) -> bytes:
    """The first record of a stream."""
    return _of_json(HEAD, {"fxguard_history": SCHEMA, "run": run, "rank": rank})


def series(registered: Iterable[Series]) -> bytes:
    """The record of more series, in the order of their positions."""
    return _of_json(SERIES, [dataclasses.asdict(each) for each in registered])


def row(measured: Row, count: int) -> bytes:
    """The record of one step.

    Args:
        measured: the numbers of the step.
        count: how many series there are; those behind the end of the row were not measured.
    """
    low, high = array("d", measured.low), array("d", measured.high)
    for numbers in (low, high):
        if len(numbers) != count:
            numbers.extend(NAN * (count - len(numbers)))
            del numbers[count:]
        if not IS_LITTLE:
            numbers.byteswap()
    numbers = low + high
    return _record(ROW, BEGIN_ROW.pack(measured.step, count) + numbers.tobytes())


def _of_json(kind: int, data: Any) -> bytes:
    return _record(kind, json.dumps(data).encode())


def _record(kind: int, rest: bytes) -> bytes:
    return BEGIN.pack(kind, len(rest), zlib.crc32(rest, kind)) + rest


@dataclass(frozen=True, slots=True)
class Stream:
    """What a stream holds."""

    run: int
    rank: int
    series: tuple[Series, ...]
    # Steps that have equally many series, one after the other; and of each step the low and then
    # the high numbers, by position.
    blocks: tuple[tuple[array[int], array[float]], ...]

    @property
    def last(self) -> int | None:
        """The last step; None without one."""
        return self.blocks[-1][0][-1] if self.blocks else None


def read_stream(path: Path) -> Stream | None:
    """What a file holds up to the first record that is not whole; None if that is not even a head.

    Raises:
        UsageError: if whole records are none of a history.
        OSError: when it cannot be read.
    """
    data = path.read_bytes()
    records = _records(data)
    try:
        first = next(records, None)
        if first is None:
            return None
        if first[0] != HEAD:
            raise ValueError("its first record is no head")
        about = of_type(json.loads(bytes(first[1])), dict)
        if about.get("fxguard_history") != SCHEMA:
            raise ValueError(f"schema {str(about.get('fxguard_history'))[:40]}")
        run, rank = of_type(about["run"], int), of_type(about["rank"], int)
        registered: list[Series] = []
        blocks: list[tuple[array[int], array[float]]] = []
        for kind, rest in records:
            if kind == SERIES:
                registered += [series_of(each) for each in of_type(json.loads(bytes(rest)), list)]
            elif kind == ROW:
                _add_row(blocks, rest, len(registered))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise UsageError(f"{path}: not a history of fxguard: {error}") from error
    return Stream(run, rank, tuple(registered), tuple(blocks))


WORDS = ("what", "source", "detail", "dtype")


def series_of(data: Any) -> Series:
    """A series that was written as JSON.

    Raises:
        ValueError: if it is none.
        KeyError: if it lacks its name.
    """
    data = of_type(data, dict)
    words = {key: of_type(data.get(key, ""), str) for key in WORDS}
    name, kind = of_type(data["name"], str), of_type(data["kind"], str)
    return Series(name, kind, order=of_type(data.get("order", 0), int), **words)


def _records(data: bytes) -> Iterator[tuple[int, memoryview]]:
    view, at = memoryview(data), 0
    while at + BEGIN.size <= len(view):
        kind, length, checksum = BEGIN.unpack_from(view, at)
        rest = view[at + BEGIN.size : at + BEGIN.size + length]
        if len(rest) < length or zlib.crc32(rest, kind) != checksum:
            return
        yield kind, rest
        at += BEGIN.size + length


def _add_row(blocks: list[tuple[array[int], array[float]]], rest: memoryview, known: int) -> None:
    step, count = BEGIN_ROW.unpack_from(rest)
    numbers = array("d")
    numbers.frombytes(rest[BEGIN_ROW.size :])
    if not IS_LITTLE:
        numbers.byteswap()
    if count > known or len(numbers) != 2 * count:
        raise ValueError(f"step {step} has numbers of {count} series, and there are {known}")
    if not blocks or len(blocks[-1][1]) != 2 * count * len(blocks[-1][0]):
        blocks.append((array("q"), array("d")))
    steps, all_numbers = blocks[-1]
    steps.append(step)
    all_numbers.extend(numbers)


def glance(path: Path) -> tuple[tuple[Series, ...], int | None]:
    """The series of a stream and the step of its last row, without a look at the numbers.

    Raises:
        UsageError: if its records are none of a history.
        OSError: when the file cannot be read.
    """
    registered: list[Series] = []
    at, last, size = 0, None, path.stat().st_size
    with path.open("rb") as file:
        while len(begin := file.read(BEGIN.size + BEGIN_ROW.size)) == BEGIN.size + BEGIN_ROW.size:
            kind, length, _ = BEGIN.unpack_from(begin)
            at += BEGIN.size
            if at + length > size:
                break
            if kind == ROW:
                last = BEGIN_ROW.unpack_from(begin, BEGIN.size)[0]
            elif kind == SERIES:
                file.seek(at)
                registered += _registered(file.read(length), path)
            at += length
            file.seek(at)
    return tuple(registered), last


def _registered(rest: bytes, path: Path) -> list[Series]:
    try:
        return [series_of(each) for each in of_type(json.loads(rest), list)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not a history of fxguard: {error}") from error
