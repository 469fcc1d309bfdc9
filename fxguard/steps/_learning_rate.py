"""What set a learning rate that is not finite: a schedule, the script's line, or its optimizer."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import os.path
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from fxguard.capture.instances import instances_of
from fxguard.records import Source
from fxguard.source.assigned import assignment_of, function_around, source_of, target_of
from fxguard.source.lines import is_internal, source_at
from fxguard.source.pure_numbers import BadPartError, bad_part
from fxguard.source.syntax import tree_of, tree_of_file
from fxguard.steps._own_schedule import bad_part_at

__all__ = ["function_of", "lines_that_set_it", "reason_of", "schedule_of", "schedulers_of"]

RATE = "lr"
MOST_LINES = 8  # that set a learning rate
MOST_MADE = 3  # statements that are shown


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedules of torch that set an optimizer's learning rate."""
    known = instances_of(LRScheduler)
    return [each for each in known if getattr(each, "optimizer", None) is optimizer]


def schedule_of(optimizer: Optimizer) -> str:
    """What set a learning rate that is not finite; "" if it is not known.

    It is a schedule of torch, with the function that it called; or the optimizer was made with it;
    or the only line that sets a learning rate in the files of the functions that are running.

    Example:
        >>> schedule_of(optimizer)
        'LambdaLR set it, at its step 3, by `rate` (train.py:12), which reads warmup = 0'
    """
    for scheduler in schedulers_of(optimizer):
        rates = [float(rate) for rate in getattr(scheduler, "_last_lr", [])]
        if not all(map(math.isfinite, rates)):
            step = f"{type(scheduler).__name__} set it, at its step {scheduler.last_epoch}"
            return step + _by_function(scheduler, rates)
    if not math.isfinite(float(optimizer.defaults.get(RATE, 0.0))):
        return f"{type(optimizer).__name__} was made with it"
    lines = [*lines_that_set_it()]
    if len(lines) != 1:
        return ""
    source = source_at(lines[0])
    made = " or ".join(str(each) for each in _made_at(source))
    return f"it is set at {source}" + (f", made at {made}" if made else "")


def reason_of(optimizer: Optimizer) -> str:
    """The part of a schedule's function that is not finite; "" if it is not known.

    Example:
        >>> reason_of(optimizer)
        '(1 - 91 / 90) ** 0.9 (train.py:12), a fractional power of a negative number'
    """
    for scheduler in schedulers_of(optimizer):
        rates = [float(rate) for rate in getattr(scheduler, "_last_lr", [])]
        functions = getattr(scheduler, "lr_lambdas", ())
        for function, rate in zip(functions, rates, strict=False):
            found = None
            if not math.isfinite(rate):
                found = bad_part(function, scheduler.last_epoch, entry=_entry)
            if found is not None:
                return _in_words(found)
    for line in itertools.islice(lines_that_set_it(), MOST_LINES):
        if (found := bad_part_at(source_at(line))) is not None:
            return _in_words(found)
    return ""


def _in_words(found: BadPartError) -> str:
    text = f"{found.text} ({found.at.place})"
    if found.is_power:
        text += ", a fractional power of a negative number"
        if found.end is not None:
            text += f": it is stepped more often than the {found.end:g} times it was made for; "
            text += "count them as the loop runs, or keep what the power is taken of at 0 by max"
        return text
    text += f", which is {found.number:g}"
    made = assignment_of(found.table, found.at) if found.table.isidentifier() else None
    return f"{text}: `{found.table}` comes from {made}" if made is not None else text


def _entry(table: Any, index: int) -> float | None:
    """An entry of a tensor of numbers."""
    if type(table) is not Tensor or table.dim() != 1 or not -len(table) <= index < len(table):
        return None
    return float(table.tolist()[index])


def _made_at(source: Source) -> list[Source]:
    """The statements of a function that compute the variable which a line of it assigns."""
    tree = tree_of(source.code)
    statement = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.Name):
        return []
    nodes = ast.walk(function_around(source))
    return [
        source_of(node, source.file)
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AugAssign))
        if target_of(source_of(node, source.file)) == value.id
    ][:MOST_MADE]


def _by_function(scheduler: LRScheduler, rates: list[float]) -> str:
    """The script's function that computed the first rate that is not finite."""
    functions = getattr(scheduler, "lr_lambdas", ())
    for function, rate in zip(functions, rates, strict=False):
        if not math.isfinite(rate) and (by := function_of(function)):
            zeros = [f"{name} = 0" for name, value in _read_by(function) if value == 0]
            reads = f", which reads {' and '.join(zeros)}" if zeros else ""
            return f", {by}{reads}"
    return ""


def function_of(function: Any) -> str:
    """``by `rate` (train.py:12)``; "" if it is not the script's."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return f"by `{code.co_name.strip('<>')}` ({place})"


def _read_by(function: Any) -> Iterator[tuple[str, float]]:
    """The numbers that a function reads as variables around it, by name."""
    found = inspect.getclosurevars(function)
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def lines_that_set_it() -> Iterator[tuple[str, int]]:
    """The lines that set a group's learning rate, in the files of functions that are running."""
    files: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            files.setdefault(frame.f_code.co_filename)
        frame = frame.f_back
    for file in files:
        tree = tree_of_file(file)
        for node in () if tree is None else ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            if isinstance(node, (ast.Assign, ast.AugAssign)) and any(map(_is_rate, targets)):
                yield file, node.lineno


def _is_rate(target: Any) -> bool:
    """Whether an expression is ``group["lr"]``."""
    is_item = isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)
    return is_item and target.slice.value == RATE
