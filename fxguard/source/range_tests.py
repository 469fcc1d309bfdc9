"""Learning-rate range tests: loops that raise the rate until the loss is lost, and then go back.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds
from fxguard.source.frame_variables import is_of_library, script_frames
from fxguard.source.lines import source_at
from fxguard.source.named import called_name

__all__ = ["range_test_now", "tests_range"]

_ASKS = ("isfinite", "isinf", "isnan")
_LOOPS = (ast.AsyncFor, ast.For, ast.While)


def range_test_now() -> Source | None:
    """The loop of a range test that this thread runs, at its line; None if there is none."""
    for frame in script_frames():
        file = frame.f_code.co_filename
        if not is_of_library(file) and (line := tests_range(source_at((file, frame.f_lineno)))):
            return source_at((file, line))
    return None


def tests_range(source: Source) -> int:
    """The line of the loop around a line, if that is a range test; 0 otherwise.

    The loop sets ``["lr"]`` and is left where something is not finite. What ``state_dict()`` gave
    before it is loaded after it.
    """
    function = function_around(source)
    for loop in (each for each in ast.walk(function) if isinstance(each, _LOOPS)):
        if not holds(loop, source.line) or not _sets_rate(loop) or not _is_left(loop):
            continue
        saved = min(_lines_of(function, "state_dict"), default=loop.lineno)
        loaded = max(_lines_of(function, "load_state_dict"), default=0)
        if saved < loop.lineno and loaded > (loop.end_lineno or loop.lineno):
            return loop.lineno
    return 0


def _sets_rate(loop: ast.AST) -> bool:
    targets = (x for node in ast.walk(loop) if isinstance(node, ast.Assign) for x in node.targets)
    return any(
        isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant) and x.slice.value == "lr"
        for x in targets
    )


def _is_left(loop: ast.AST) -> bool:
    """Whether a test for what is not finite leaves it."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(x, ast.Break) for x in node.body):
            calls = (x for x in ast.walk(node.test) if isinstance(x, ast.Call))
            if any(called_name(each) in _ASKS for each in calls):
                return True
    return False


def _lines_of(function: ast.AST, name: str) -> Iterator[int]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and called_name(node) == name:
            yield node.lineno
