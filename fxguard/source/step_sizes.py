"""Where a program makes the step of an explicit scheme, and how large it may be for diffusion."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from fxguard.records import Source
from fxguard.source.assigned import (
    assignment_of,
    function_called_in,
    source_of,
    statement_node,
)
from fxguard.source.syntax import tree_of_file

__all__ = ["made_at", "stencil_in"]

MOST_STATEMENTS = 4  # from a step back to a function that computes it
STENCILS = (2, 4, 6)  # the neighbours of a point in one, two and three dimensions


def made_at(name: str, read_at: Source) -> tuple[Source | None, str]:
    """The statement that made a step, and the function behind it, ```stable_dt`, heat.py:23``.

    Args:
        name: of the step, ``dt``.
        read_at: the line that takes the step.

    Returns:
        None, and "", where that is not certain.
    """
    first = assignment_of(name, read_at) if name.isidentifier() else None
    todo = [] if first is None or first.line == read_at.line else [first]
    for at in todo:
        statement = statement_node(at)
        if statement is None or len(todo) > MOST_STATEMENTS:
            break
        called = function_called_in(statement, at.file)
        if isinstance(called, ast.FunctionDef):
            returns = [x for x in ast.walk(called) if isinstance(x, ast.Return)]
            if len(returns) == 1:
                return first, f"`{called.name}`, {source_of(returns[0], at.file).place}"
        read = {x.id for x in ast.walk(statement) if isinstance(x, ast.Name)}
        found = (assignment_of(each, at) for each in sorted(read))
        todo += [x for x in found if x is not None and x.line < at.line and x not in todo]
    return (todo[0] if todo else None), ""


def stencil_in(values: Sequence[ast.expr], name: str, file: str) -> int:
    """How many neighbours of each point a Laplacian of a variable adds up: 4 in two dimensions.

    Args:
        values: the expressions, which may call functions of the file.
        name: of the variable.
        file: of the program.

    Returns:
        0 if there is no such Laplacian, or several that differ.
    """
    found = {each for value in values for each in _stencils(value, name)}
    for node in (each for value in values for each in ast.walk(value)):
        reads = isinstance(node, ast.Call) and len(node.args) > 0
        if not reads or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        first = node.args[0]
        if isinstance(first, ast.Name) and first.id == name:
            function = _function(node.func.id, file)
            argument = function.args.args[0].arg if function and function.args.args else ""
            for each in ast.walk(function) if function is not None and argument else ():
                if isinstance(each, ast.expr):
                    found.update(_stencils(each, argument))
    return found.pop() if len(found) == 1 else 0


def _function(name: str, file: str) -> ast.FunctionDef | None:
    tree = tree_of_file(file)
    nodes = [] if tree is None else ast.walk(tree)
    found = [x for x in nodes if isinstance(x, ast.FunctionDef) and x.name == name]
    return found[0] if len(found) == 1 else None


def _stencils(value: ast.expr, name: str) -> Iterator[int]:
    """``a + b + c + d - 4 * u``: as many neighbours as the point is subtracted times."""
    for node in ast.walk(value):
        terms = list(_terms(node, 1)) if isinstance(node, ast.BinOp) else []
        centres = [each for sign, each in terms if sign < 0 or _number_of(each) in STENCILS]
        if len(terms) - 1 not in STENCILS or len(centres) != 1:
            continue
        sign = next(sign for sign, each in terms if each is centres[0])
        reads = any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(centres[0]))
        if sign < 0 and reads and _number_of(centres[0]) == len(terms) - 1:
            yield len(terms) - 1


def _terms(node: ast.expr, sign: int) -> Iterator[tuple[int, ast.expr]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield from _terms(node.left, sign)
        yield from _terms(node.right, sign if isinstance(node.op, ast.Add) else -sign)
    else:
        yield sign, node


def _number_of(node: ast.expr) -> float:
    """4 of ``4 * u``; 0 of others."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return 0
    numbers = [x.value for x in (node.left, node.right) if isinstance(x, ast.Constant)]
    return numbers[0] if len(numbers) == 1 and isinstance(numbers[0], (int, float)) else 0
