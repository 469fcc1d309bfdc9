"""The code that runs now, in all threads."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["running_code"]


def running_code() -> set[int]:
    """The ``id`` of each code object that runs now.

    No variable refers to a frame when this returns. This function's own frame is among them, and
    would keep itself, its callers and their variables until the garbage collector comes.
    """
    found: set[int] = set()
    frames = list(sys._current_frames().values())
    while frames:
        frame: FrameType | None = frames.pop()
        while frame is not None:
            found.add(id(frame.f_code))
            frame = frame.f_back
    return found
