"""Whether a program adds the result of an operation to something else, as an offset."""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node, target_of
from fxguard.source.named import called_name, variables_in

__all__ = ["is_added_at"]


def is_added_at(source: Source, name: str) -> bool:
    """Whether a statement, or its function with what that assigns, adds or subtracts the result.

    A number, and what is computed of the result, as its mean, do not count.

    Args:
        source: the line of the operation.
        name: its plain name.
    """
    statement, variable = statement_node(source), target_of(source)
    if statement is None:
        return False
    if any(_is_call(side, name) and not _is_number(other) for side, other in _sums(statement)):
        return True
    pairs = _sums(function_around(source)) if variable else []
    return any(
        _is_variable(side, variable)
        and not _is_number(other)
        and variable not in variables_in(ast.unparse(other))
        for side, other in pairs
    )


def _sums(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """The two sides of each sum and difference, in both orders."""
    found = [
        (each.left, each.right)
        for each in ast.walk(node)
        if isinstance(each, ast.BinOp) and isinstance(each.op, (ast.Add, ast.Sub))
    ]
    return [*found, *((right, left) for left, right in found)]


def _is_number(node: ast.expr) -> bool:
    return not any(isinstance(each, (ast.Name, ast.Call)) for each in ast.walk(node))


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and called_name(node) == name


def _is_variable(node: ast.expr, name: str) -> bool:
    """It, or a part of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name
