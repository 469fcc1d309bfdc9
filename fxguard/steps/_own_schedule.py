"""Schedules that a script has written itself, which set the learning rate of a group."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from fxguard.capture.instances import instances_of
from fxguard.records import Source
from fxguard.source.assigned import function_around, holds
from fxguard.source.pure_numbers import BadPartError, bad_part_of
from fxguard.source.syntax import tree_of_file

__all__ = ["bad_part_at"]

MOST = 8  # objects of a class


def bad_part_at(source: Source) -> BadPartError | None:
    """The part of what a line sets that is not finite, with its numbers; None if it is not found.

    Args:
        source: the line that sets a learning rate, ``group["lr"] = rate``, in a method of an object
            or in a function that is running.
    """
    function = function_around(source)
    counted = set(_counted(function))
    body = [x for x in _statements(function, source.line) if _assigned(x) not in counted]
    for variables, last in _variables(source, function):
        before = _added_after(function, source.line, last)
        if (found := bad_part_of(body, source.file, variables, before)) is not None:
            return found
    return None


def _added_after(function: ast.AST, line: int, last: float) -> dict[str, float | None]:
    """What the statements of a function behind a line have added to its variables, by name.

    Args:
        function: the function.
        line: the line.
        last: what stands below it has not run yet.
    """
    body = getattr(function, "body", ())
    surely = {id(each) for each in body}  # not those under an `if` or in a loop
    found: dict[str, float | None] = {}
    for each in ast.walk(function):
        if isinstance(each, ast.AugAssign) and line < each.lineno <= last:
            name, added = ast.unparse(each.target), None
            value = each.value.value if isinstance(each.value, ast.Constant) else None
            if id(each) in surely and isinstance(value, (int, float)) and name not in found:
                added = {ast.Add: value, ast.Sub: -value}.get(type(each.op))
            found[name] = added
    return found


def _counted(function: ast.AST) -> Iterator[str]:
    """The variables that a function counts, ``it += 1``: they are no more what they began as."""
    for each in ast.walk(function):
        if isinstance(each, ast.AugAssign):
            yield ast.unparse(each.target)


def _assigned(statement: ast.stmt) -> str:
    return ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _statements(function: ast.AST, line: int) -> Iterator[ast.stmt]:
    """The statements of a function up to a line, in order, with those of loops around it."""
    for each in getattr(function, "body", ()):
        if each.lineno > line:
            return
        yield each
        if holds(each, line):
            yield from _statements(each, line)


def _variables(source: Source, function: ast.AST) -> Iterator[tuple[Mapping[str, Any], float]]:
    """The variables of a function, as they are now, and the last line of it that has run.

    They are those of the frame that runs it, or of an object.
    """
    name = getattr(function, "name", "<module>")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == source.file and frame.f_code.co_name == name:
            yield {**frame.f_globals, **frame.f_locals}, frame.f_lineno - 1
        frame = frame.f_back
    owner = _class_around(source)
    arguments = getattr(getattr(function, "args", None), "args", ())
    if owner is None or not arguments:
        return
    modules = [x for x in sys.modules.values() if isinstance(x, ModuleType)]
    for held in map(vars, modules):  # not by getattr, which may import
        kind = held.get(owner) if held.get("__file__") == source.file else None
        if isinstance(kind, type):
            each: object
            for each in instances_of(kind)[:MOST]:
                yield {**held, arguments[0].arg: each}, math.inf


def _class_around(source: Source) -> str | None:
    """The name of the class that a line is in."""
    tree = tree_of_file(source.file)
    nodes = () if tree is None else ast.walk(tree)
    return next(
        (x.name for x in nodes if isinstance(x, ast.ClassDef) and holds(x, source.line)), None
    )
