"""Frames as compact JSON: the constant part once for all batches, and numbers in a flat list.

Trace files hold frames this way, and HTML pages the constant part. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.records import Frame, Row, Source

__all__ = [
    "INFINITE",
    "as_json",
    "collector_paused",
    "layout_of",
    "numbers_of",
    "of_type",
    "read_text",
    "share_layout",
]

INFINITE = {"nan": float("nan"), "inf": float("inf")}  # magnitudes: none is negative


def layout_of(frames: Iterable[Frame]) -> dict[str, Any]:
    """Names, kinds and sources of frames, and labels and dtypes of their rows, without numbers."""
    sources: dict[Source, int] = {}
    dtypes: dict[str, int] = {}
    listed = []
    for frame in frames:
        place = None
        if frame.source is not None:
            place = sources.setdefault(frame.source, len(sources))
        labels = [row.label for row in frame.rows]
        of_rows = [dtypes.setdefault(row.dtype, len(dtypes)) for row in frame.rows]
        phase = [frame.phase] if frame.phase != "forward" else []
        kind = frame.kind_and_phase
        listed.append([frame.name, kind, int(frame.is_op), place, labels, of_rows, *phase])
    places = [[s.file, s.line, s.code] for s in sources]
    return {"sources": places, "dtypes": list(dtypes), "frames": listed}


def numbers_of(rows: Sequence[Row]) -> list[Any]:
    """``[abs min, abs max]`` of each row, or the note in place of the numbers."""
    numbers: list[Any] = []
    for row in rows:
        low, high = row.abs_min, row.abs_max
        if low is None or high is None:
            numbers.append(row.note or "None")
        else:
            numbers.append([rounded(low), rounded(high)])
    return numbers


def rounded(value: float) -> float | str:
    """A magnitude as JSON holds it: six digits, or ``"nan"`` or ``"inf"``."""
    if value < math.inf:
        return float(f"{value:.6g}")  # float32 has seven, and the last is rarely of interest
    return "nan" if math.isnan(value) else "inf"


def share_layout(a: Sequence[Frame], b: Sequence[Frame]) -> bool:
    """Whether frames certainly have the same layout, because they share a line of a file.

    If this is False, frames may still have equal layouts.
    """
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if x.name is not y.name or x.kind is not y.kind or x.is_op != y.is_op:
            return False
        if x.phase != y.phase:
            return False
        if x.source is not y.source or len(x.rows) != len(y.rows):
            return False
        for one, other in zip(x.rows, y.rows, strict=True):
            if one.label is not other.label or one.dtype is not other.dtype:
                return False
    return True


def of_type(data: Any, *kinds: type) -> Any:
    """A piece of parsed JSON, checked to have one of some types; True does not count as a number.

    Raises:
        ValueError: when it is something else.
    """
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        raise ValueError(f"{str(data)[:40]!r} is not of type {kinds[0].__name__}")
    return data


def read_text(path: Path) -> str:
    """The text of a JSON file.

    Raises:
        FxguardError: when it cannot be read, or is no file.
        FileNotFoundError: when there is no such file.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:  # such as a folder, a loop of links, somebody else's file
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Suspend garbage collection, whose repeated scans of millions of rows take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_json(data: Any) -> str:
    """One line of strict JSON in ASCII."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
