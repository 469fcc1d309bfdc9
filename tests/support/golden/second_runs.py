"""Counts second runs: how often a graph is run again, and for whom."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from fxguard.rerun.start import Start

__all__ = ["second_runs"]

BEGINS = next(name for name in ("copies", "begun", "again") if hasattr(Start, name))
SHOWN = 3  # callers that are named


@contextlib.contextmanager
def second_runs() -> Iterator[list[str]]:
    """A list that grows by one line with each second run that begins meanwhile: who began it."""
    runs: list[str] = []
    before = getattr(Start, BEGINS)

    def begins(start: Start, *args: Any, **kwargs: Any) -> Any:
        runs.append(beginner(sys._getframe(1)))
        return before(start, *args, **kwargs)

    setattr(Start, BEGINS, begins)
    try:
        yield runs
    finally:
        setattr(Start, BEGINS, before)


def beginner(frame: FrameType | None) -> str:
    """The functions that began a second run, the innermost first: one for each file."""
    found: dict[str, str] = {}
    while frame is not None and len(found) < SHOWN:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if "fxguard" in file.parts and file.name != "start.py":
            found.setdefault(file.stem, f"{file.stem}.{code.co_name}")
        frame = frame.f_back
    return ", for ".join(found.values())
