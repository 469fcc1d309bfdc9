"""Variables of the running frames of a script, and what they hold a few steps further.

The search costs little however many objects a process has. No code of the user runs.
"""

from __future__ import annotations

import functools
import inspect
import os.path
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fxguard.forgiving import where_theirs_may_raise
from fxguard.source.lines import is_internal

__all__ = ["NAMELESS", "held_by", "is_of_library", "script_frames", "variables_of"]

MOST_FRAMES = 100
MOST_ITEMS = 100  # of one container

# Variables that name no object: the next frame outwards often has a name for the same one.
NAMELESS = ("self", "cls")
HELD_BY_TORCH = ("_modules", "_parameters", "_buffers")
# Their code reads its own variables as a dictionary: reading them again would change that.
READS_VARIABLES = frozenset({"locals", "vars", "f_locals", "eval", "exec", "dir"})
OF_THE_FRAME = 3  # references to a dictionary of a frame that nobody else has: its own, and ours
STDLIB = sysconfig.get_path("stdlib") + os.sep
INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


def script_frames() -> Iterator[FrameType]:
    """The frames of this thread that run code of scripts and libraries, the outermost first."""
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None and len(found) < MOST_FRAMES:
        file = frame.f_code.co_filename
        if not is_internal(file) and not (file.startswith(STDLIB) and not is_of_library(file)):
            found.append(frame)
        frame = frame.f_back
    return reversed(found)


@functools.lru_cache(maxsize=1024)
def is_of_library(file: str) -> bool:
    """Whether a file was installed with a package."""
    return file.startswith(INSTALLED)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running frame: its globals, then its own.

    Before Python 3.13 reading the variables of a function makes a dictionary that the frame keeps:
    what it holds would live until the function returns.
    """
    found = dict(frame.f_globals)
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # of a module or a class, which is the dictionary
        return found | dict(frame.f_locals)
    if sys.version_info >= (3, 13):
        return found | dict(frame.f_locals)
    if READS_VARIABLES.isdisjoint(code.co_names):
        variables = frame.f_locals
        found |= variables
        if sys.getrefcount(variables) == OF_THE_FRAME:
            variables.clear()
    return found


def held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, as names and values: attributes, or the items of a container."""
    with where_theirs_may_raise():  # another thread changes it
        if isinstance(value, dict):
            yield from [(str(key), each) for key, each in [*dict.items(value)][:MOST_ITEMS]]
        elif isinstance(value, (list, tuple, deque)):
            yield from [(str(index), each) for index, each in enumerate([*value][:MOST_ITEMS])]
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            found = [(name, each) for name, each in attributes.items() if type(name) is str]
            yield from [pair for pair in found[:MOST_ITEMS] if pair[0] not in HELD_BY_TORCH]
