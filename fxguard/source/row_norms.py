"""Whether a statement divides by a norm over one dimension: that of each row, of each column."""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import statement_node

__all__ = ["dimension_of_norm"]

NORMS = frozenset(["norm", "vector_norm"])


def dimension_of_norm(source: Source) -> str:
    """``dim=1`` of ``x = x / x.norm(dim=1, keepdim=True)``, and of ``normalize``; "" of others.

    Args:
        source: the line of the statement.
    """
    statement = statement_node(source)
    for node in [] if statement is None else ast.walk(statement):
        if isinstance(node, ast.Call) and _name(node) == "normalize" and node.args:
            return _one_dimension(node, position=2, default="dim=1")
        divides = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)
        below = node.right if isinstance(node, ast.BinOp) else getattr(node, "value", None)
        for inner in ast.walk(below) if divides and below is not None else ():
            if isinstance(inner, ast.Call) and _name(inner) in NORMS:
                return _one_dimension(inner, position=2 if _is_function(inner) else 1, default="")
    return ""


def _name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_function(node: ast.Call) -> bool:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return ast.unparse(owner).split(".")[0] == "torch" if owner is not None else False


def _one_dimension(node: ast.Call, *, position: int, default: str) -> str:
    """The dimension that a call names, if it names one."""
    named = {each.arg: each.value for each in node.keywords}
    given = named.get("dim", named.get("axis"))
    if given is None and len(node.args) > position:
        given = node.args[position]
    if given is None:
        return default
    if isinstance(given, (ast.Tuple, ast.List)) and len(given.elts) == 1:
        given = given.elts[0]
    number = ast.unparse(given)
    return f"dim={number}" if number.lstrip("-").isdigit() else ""
