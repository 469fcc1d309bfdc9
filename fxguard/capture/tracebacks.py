"""Tracebacks as plain Python would show them: frames of fxguard and of a capture are left out."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

from fxguard.capture.plain_stack import Call, plain_calls
from fxguard.source.syntax import ONE_AT_A_TIME

__all__ = ["hide_frames"]


def hide_frames(error: BaseException) -> None:
    """Leave out of a traceback, and of those that belong to it, what plain Python does not have."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _plain_traceback(each.__traceback__)
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _plain_traceback(trace: TracebackType | None) -> TracebackType | None:
    calls = []
    while trace is not None:
        code = trace.tb_frame.f_code
        place = code.co_filename, trace.tb_lineno
        calls.append(Call(*place, code.co_name, trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    if not any(call.is_between for call in calls):
        return _linked(calls)
    return _linked(plain_calls(calls))


def _linked(calls: Sequence[Call]) -> TracebackType | None:
    trace: TracebackType | None = None
    for call in reversed(calls):
        frame, last = call.frame, call.last
        if frame is None or call.is_changed:
            frame, last = _frame_at(call)
        trace = TracebackType(trace, frame, last, call.line)
    return trace


class _HereError(Exception):
    pass


def _raise() -> None:
    raise _HereError


def _frame_at(call: Call) -> tuple[FrameType, int]:
    """A frame that stands at a line of the user's, with the variables of the real one."""
    variables = {} if call.frame is None else dict(call.frame.f_locals)
    known = {} if call.frame is None else call.frame.f_globals
    names = {**known, "__fxguard_raise": _raise}
    try:
        exec(_code_at(call.file, call.line, call.name), names, variables)
    except _HereError:
        trace = sys.exc_info()[2]
    assert trace is not None
    assert trace.tb_next is not None
    frame = trace.tb_next.tb_frame
    return frame, trace.tb_next.tb_lasti


@functools.lru_cache(maxsize=1024)
def _code_at(file: str, line: int, name: str) -> CodeType:
    """Code that raises at a line of a file. It covers the line, so that no part is underlined."""
    text = linecache.getline(file, line).rstrip()
    start, end = len(text) - len(text.lstrip()), len(text.encode())
    if text.lstrip().startswith("return ") and text.endswith(")"):
        start += len("return ")  # Python underlines the call
    with ONE_AT_A_TIME:
        tree = ast.parse("__fxguard_raise()")
        for node in ast.walk(tree):
            if isinstance(node, (ast.stmt, ast.expr)):
                node.lineno = node.end_lineno = line
                node.col_offset, node.end_col_offset = start, max(end, start)
        code = compile(tree, file, "exec")
    changes: dict[str, Any] = {"co_name": name}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = name
    return code.replace(**changes)
