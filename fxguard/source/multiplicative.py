"""Multiplicative updates: ``w * (v @ h.t()) / (w @ h @ h.t())``, as a factorization has them.

By the program's text. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source._recurrences import names_in
from fxguard.source.assigned import assignment_of, source_of, statement_node
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["multiplied_at"]

_PRODUCTS = ("bmm", "einsum", "matmul", "mm")
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Return)


def multiplied_at(source: Source) -> tuple[str, tuple[Source, ...]] | None:
    """What a line multiplies by a quotient whose divisor is a product with it; other such lines.

    Args:
        source: the line of the division.

    Example:
        >>> multiplied_at(Source("nmf.py", 9, "w = w * (v @ h.t()) / (w @ h @ h.t())"))
        ("w", ())
    """
    statement, tree = statement_node(source), tree_of_file(source.file)
    name = "" if statement is None else _updated(statement, source)
    if not name or tree is None:
        return None
    others = [
        at
        for each in ast.walk(tree)
        if isinstance(each, _STATEMENTS) and each is not statement
        if _updated(each, at := source_of(each, source.file)) and at.position != source.position
    ]
    return name, tuple(others)


def _updated(statement: ast.stmt, source: Source) -> str:
    for factors, quotients in _products_of(statement):
        for above, below in quotients:
            named = [each.id for each in factors if isinstance(each, ast.Name)]
            divisor, dividend = _value(below, source), _value(above, source)
            for name in named:
                is_of_it = name in names_in(divisor) and _has_product(divisor)
                if is_of_it and name not in names_in(dividend) and _has_product(dividend):
                    return name
    return ""


_Quotient = tuple[ast.expr, ast.expr]


def _products_of(statement: ast.stmt) -> Iterator[tuple[list[ast.expr], list[_Quotient]]]:
    """The factors of products with a quotient: ``x * a / b``, ``x * (a / b)``, ``x *= a / b``."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        if isinstance(statement.value, ast.BinOp) and isinstance(statement.value.op, ast.Div):
            yield [statement.target], [(statement.value.left, statement.value.right)]
        return
    for node in () if value is None else ast.walk(value):
        if not isinstance(node, ast.BinOp):
            continue
        if isinstance(node.op, ast.Div) and _is_product(node.left):
            left, right = node.left.left, node.left.right  # type: ignore[attr-defined]
            yield [left], [(right, node.right)]
            yield [right], [(left, node.right)]
        if isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(other, ast.BinOp) and isinstance(other.op, ast.Div):
                    yield [one], [(other.left, other.right)]


def _is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _value(node: ast.expr, source: Source) -> ast.expr:
    """What a variable was assigned; the expression itself if it is none."""
    made = assignment_of(node.id, source) if isinstance(node, ast.Name) else None
    statement = None if made is None else statement_node(made)
    value = getattr(statement, "value", None)
    return node if value is None else value


def _has_product(node: ast.expr) -> bool:
    return any(
        (isinstance(each, ast.BinOp) and isinstance(each.op, ast.MatMult))
        or (isinstance(each, ast.Call) and called_name(each) in _PRODUCTS)
        for each in ast.walk(node)
    )
