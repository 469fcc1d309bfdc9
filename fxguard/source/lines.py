"""The user's line, from the stack trace of a graph's node or from live Python frames."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os.path
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import typing_extensions

from fxguard.records import Source

__all__ = [
    "Place",
    "as_if_called_at",
    "calling_line",
    "is_internal",
    "is_line_given",
    "lines_of_trace",
    "source_at",
    "source_of_caller",
    "source_of_method",
    "source_of_trace",
    "warn_user",
]

# Lines in these folders are never the user's: the calling line is shown instead.
INTERNAL = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # all of fxguard
)
# Those that wrap functions of others: what is deprecated, say.
WRAPPERS = frozenset(x.__file__ for x in (contextlib, functools, warnings, typing_extensions))
Place = tuple[str, int]  # file and line

ENTRY = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?P<code>[^\n]*))?')


@functools.cache  # called for each frame of the stack, for each operation
def is_internal(file: str) -> bool:
    """Whether a file belongs to torch or fxguard, or is not a file at all."""
    return file.startswith(("<", *INTERNAL)) or file in WRAPPERS


@functools.lru_cache(maxsize=4096)
def source_of_trace(trace: str | None) -> Source | None:
    """The innermost line outside torch in a formatted stack trace, as kept by FX nodes."""
    found = None
    for entry in ENTRY.finditer(trace or ""):
        if not is_internal(entry["file"]):
            found = entry
    if found is None:
        return None
    return Source(found["file"], int(found["line"]), (found["code"] or "").strip())


def lines_of_trace(trace: str | None) -> list[Place]:
    """The place of each call in a formatted stack trace, outermost first."""
    return [(entry["file"], int(entry["line"])) for entry in ENTRY.finditer(trace or "")]


def source_of_caller() -> Source | None:
    """The innermost line outside torch among the running Python frames."""
    place = calling_line()
    return None if place is None else source_at(place)


def calling_line(inner: int = 0) -> Place | None:
    """The same without the text of the line, which costs more.

    Args:
        inner: how many frames further out to begin, if it is known that so many are not the user's.
    """
    if _instead.place is not None:
        return _instead.place
    frame = _user_frame(inner)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class _Instead(threading.local):
    place: Place | None = None


_instead = _Instead()


def is_line_given() -> bool:
    """Whether :func:`calling_line` gives a line that has run before."""
    return _instead.place is not None


@contextlib.contextmanager
def as_if_called_at(place: Place | None) -> Iterator[None]:
    """Let :func:`calling_line` give a line that has run before, while its operation runs again."""
    before, _instead.place = _instead.place, place
    try:
        yield
    finally:
        _instead.place = before


def source_at(place: Place) -> Source:
    """A line with its text."""
    return Source(*place, linecache.getline(*place).strip())


def source_of_method(method: Any) -> Source | None:
    """The line where a Python function begins, after its decorators."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return None
    lines = range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1)
    places = (source_at((code.co_filename, line)) for line in lines)
    return next((place for place in places if place.code.startswith("def ")), None)


def warn_user(message: str) -> None:
    """Warn at the innermost running line outside torch and fxguard."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    # Like `warnings.warn` with a stacklevel, but the number of inner frames varies.
    warnings.warn_explicit(
        message,
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _user_frame(inner: int = 0) -> FrameType | None:
    """The innermost Python frame outside torch and fxguard."""
    frame: FrameType | None = sys._getframe(1 + inner)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
