"""Frames as compact JSON: what stays the same for every batch once, and numbers in a flat list.

Trace files and HTML pages hold frames this way. Knows nothing of torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.records import Frame, Row, Source

__all__ = ["INFINITE", "as_json", "numbers_of", "of_type", "plan_of", "read_text"]

DIGITS = 6  # significant ones: float32 has seven, and the last is seldom of interest
INFINITE = {"nan": float("nan"), "inf": float("inf")}  # magnitudes: none is negative


def plan_of(frames: Iterable[Frame]) -> dict[str, Any]:
    """What frames are called, where they come from, and the labels and dtypes of their rows."""
    sources: dict[Source, int] = {}
    dtypes: dict[str, int] = {}
    listed = []
    for frame in frames:
        place = None
        if frame.source is not None:
            place = sources.setdefault(frame.source, len(sources))
        labels = [row.label for row in frame.rows]
        of_rows = [dtypes.setdefault(row.dtype, len(dtypes)) for row in frame.rows]
        listed.append([frame.name, frame.kind, int(frame.is_op), place, labels, of_rows])
    places = [[s.file, s.line, s.code] for s in sources]
    return {"sources": places, "dtypes": list(dtypes), "frames": listed}


def numbers_of(rows: Sequence[Row]) -> list[Any]:
    """``[abs min, abs max]`` of each row, or the note that stands in their place."""
    return [
        row.note or "None"
        if row.abs_min is None or row.abs_max is None
        else [_number(row.abs_min), _number(row.abs_max)]
        for row in rows
    ]


def _number(value: float) -> float | str:
    rounded = float(f"{value:.{DIGITS}g}")
    return next((name for name, x in INFINITE.items() if str(x) == str(rounded)), rounded)


def of_type(data: Any, *kinds: type) -> Any:
    """A piece of JSON that was read, when it is what it has to be; True is no number here.

    Raises:
        ValueError: when it is something else.
    """
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        raise ValueError(f"{str(data)[:40]!r} is not of type {kinds[0].__name__}")
    return data


def read_text(path: Path) -> str:
    """The text of a file that is to be read as JSON.

    Raises:
        FxguardError: when it cannot be read, or is no file.
        FileNotFoundError: when there is none.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder, a circle of links, somebody else's file
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def as_json(data: Any) -> str:
    """One line of strict JSON in ASCII."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
