"""Weights that a program gives to the terms of a mean: ``(w * error).mean()``, by its text.

Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node, target_of

__all__ = ["weighs_terms_at"]

_REDUCES = ("mean", "sum")
_NO_VARIABLES = frozenset(["F", "math", "nn", "np", "self", "torch"])
_NEAR = 12  # lines from the weight to the mean


def weighs_terms_at(source: Source) -> str:
    """The variable that a line assigns, if it weighs the terms of a mean or sum; "" if not.

    In ``(w * error + log_var).mean()`` with ``w = exp(-log_var)`` it is a precision, no weight.

    Args:
        source: the line.

    Example:
        For ``w = torch.exp(a)`` in front of ``(w * (x - y) ** 2).mean()``: ``"w"``.
    """
    name, made = target_of(source), statement_node(source)
    if not name.isidentifier() or made is None:
        return ""
    behind = _names_in(made) - {name}
    for node in ast.walk(function_around(source)):
        is_near = 0 <= getattr(node, "lineno", -1) - source.line <= _NEAR
        if is_near and any(
            _is_weighed(term, name) and behind.isdisjoint(_names_in(term))
            for term in _terms_of(node)
        ):
            return name
    return ""


def _terms_of(node: ast.AST) -> list[ast.expr]:
    """What a call averages or sums up: ``x`` of ``x.mean()``, of ``-x.mean()`` and ``mean(x)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    return [node.func.value, *node.args[:1]] if node.func.attr in _REDUCES else []


def _is_weighed(term: ast.expr, name: str) -> bool:
    """Whether a product has a variable for a factor, and something else for the other one."""
    if isinstance(term, ast.UnaryOp):
        return _is_weighed(term.operand, name)
    if not isinstance(term, ast.BinOp) or not isinstance(term.op, ast.Mult):
        return False
    sides = (term.left, term.right)
    is_name = [isinstance(x, ast.Name) and x.id == name for x in sides]
    return is_name in ([True, False], [False, True]) or any(_is_weighed(x, name) for x in sides)


def _names_in(node: ast.AST) -> set[str]:
    """The variables that it reads."""
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - _NO_VARIABLES
