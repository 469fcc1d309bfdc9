"""The code that Python runs for a line, and whether the file still holds it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fxguard.records import Source
from fxguard.source.frame_variables import script_frames

__all__ = ["STARTED", "RunningCode", "codes_of", "is_still"]

STARTED = time.time()  # about when this process began to look at the program
MOST_OBJECTS = 5000  # of one module, looked at for functions


@dataclass(frozen=True, slots=True)
class RunningCode:
    """One function, or the whole of a file, as Python has loaded it. It can be pickled."""

    file: str
    name: str
    first_line: int
    digest: str  # of its instructions, names, constants and lines

    @classmethod
    def of(cls, code: CodeType) -> RunningCode:
        """The identity of some code."""
        constants = [repr(x) for x in code.co_consts if not isinstance(x, CodeType)]
        parts = code.co_code, code.co_names, constants, [*code.co_lines()]
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return cls(code.co_filename, code.co_name, code.co_firstlineno, digest)


def codes_of(source: Source) -> tuple[RunningCode, ...]:
    """The functions that hold a line, as Python has loaded them; () if none is found.

    Args:
        source: the line.
    """
    found = (each for each in _loaded(source.file) if _holds(each, source.line))
    return tuple(dict.fromkeys(map(RunningCode.of, found)))


def _loaded(file: str) -> Iterator[CodeType]:
    """The code of running frames and of loaded modules of a file."""
    for frame in script_frames():
        if frame.f_code.co_filename == file:
            yield from _with_inner(frame.f_code)
    for module in [*sys.modules.values()]:
        # A module that is loaded when it is first used would be loaded by `vars`.
        names = object.__getattribute__(module, "__dict__") if _is_module(module) else {}
        if names.get("__file__") == file:
            for value in [*names.values()][:MOST_OBJECTS]:
                for code in _of_value(value):
                    if code.co_filename == file:
                        yield from _with_inner(code)


def _is_module(value: Any) -> bool:
    return issubclass(type(value), ModuleType)


def _of_value(value: Any) -> Iterator[CodeType]:
    """The code of a function, or of the methods of a class, below decorators that name it."""
    found = [*vars(value).values()] if isinstance(value, type) else [value]
    for each in found:
        inner = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
        while isinstance(inner, FunctionType):
            yield inner.__code__
            inner = vars(inner).get("__wrapped__")


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)


def _holds(code: CodeType, line: int) -> bool:
    return any(each == line for *_, each in code.co_lines())


def is_still(code: RunningCode, text: str) -> bool:
    """Whether a file's text holds some code as it was loaded.

    Args:
        code: of a function, or of a whole file.
        text: the file now.
    """
    compiled = compile(text, code.file, "exec", dont_inherit=True)
    return any(code == RunningCode.of(each) for each in _with_inner(compiled))
