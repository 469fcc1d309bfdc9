"""Whether a line of a loop divides a variable that another line of the loop divides, too."""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds, statement_node

__all__ = ["is_divided_in_turn"]

_LOOPS = (ast.For, ast.While)


def is_divided_in_turn(source: Source) -> bool:
    """Whether rows and columns are normalised in turn, as by Sinkhorn's algorithm.

    Args:
        source: the line of a division.
    """
    name = _divided(statement_node(source))
    loops = [each for each in ast.walk(function_around(source)) if isinstance(each, _LOOPS)]
    return bool(name) and any(
        holds(each, source.line) and sum(_divided(node) == name for node in ast.walk(each)) > 1
        for each in loops
    )


def _divided(node: ast.AST | None) -> str:
    """``q`` of ``q = q / q.sum()`` and ``q /= q.sum()``; "" of others."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return ast.unparse(node.target)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return ""
    value, is_quotient = node.value, False
    while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        value, is_quotient = value.left, True
    target = ast.unparse(node.targets[0])
    return target if is_quotient and ast.unparse(value) == target else ""
