"""What a user wrote, and what a library brought."""

from __future__ import annotations

import sys
from types import FrameType

from fxguard.records import Source
from fxguard.source.frame_variables import INSTALLED, STDLIB
from fxguard.source.lines import is_internal, source_at

__all__ = ["is_of_script", "is_own", "own_files", "source_of_script"]


def is_of_script(kind: type) -> bool:
    """Whether a class was written in a file that nobody installed."""
    return is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def own_files() -> list[str]:
    """The files of all modules that were imported and that nobody installed."""
    found = (getattr(module, "__file__", None) or "" for module in [*sys.modules.values()])
    return sorted({file for file in found if is_own(file)})


def source_of_script() -> Source | None:
    """The innermost running line of a file that nobody installed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else source_at((frame.f_code.co_filename, frame.f_lineno))


def is_own(file: str) -> bool:
    """Whether a file belongs to no library: nobody installed it."""
    return bool(file) and not is_internal(file) and not file.startswith((*INSTALLED, STDLIB))
