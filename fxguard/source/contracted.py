"""Sums over a dimension whose rows a recursion of matrix products keeps apart, by the text.

``alpha = alpha @ trans`` at each turn, and ``alpha / alpha.sum(0)``. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source._recurrences import names_in
from fxguard.source.assigned import assignment_of, source_of, statement_node
from fxguard.source.iterated import Iterated, iterated_at
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["SummedAcross", "summed_across"]

_PRODUCTS = ("matmul", "mm", "bmm")


@dataclass(frozen=True, slots=True)
class SummedAcross:
    """A sum across rows: of what, over which dimension, and the product that keeps rows apart."""

    name: str
    dim: int
    source: Source
    product: str
    product_at: Source


def summed_across(source: Source, dims: int) -> SummedAcross | None:
    """The sum by which a line divides what it sums, if a loop keeps its terms apart.

    Args:
        source: the line of the division.
        dims: how many dimensions the quotient has.
    """
    found, statement = iterated_at(source), statement_node(source)
    if found is None or statement is None or dims < 2:
        return None
    for dividend, divisor in _divisions(statement):
        at = source
        if isinstance(divisor, ast.Name):
            made = assignment_of(divisor.id, source)
            node = None if made is None else statement_node(made)
            if made is None or node is None:
                continue
            at, divisor = made, getattr(node, "value", divisor)
        name = dividend.id if isinstance(dividend, ast.Name) else ""
        dim = _dimension(divisor, name)
        if name not in found.made_of_it or dim is None or dim in (-1, dims - 1):
            continue
        product = _product(found, source.file)
        return None if product is None else SummedAcross(name, dim, at, *product)
    return None


def _divisions(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div):
        yield statement.target, statement.value
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.left, node.right


def _dimension(node: ast.expr, name: str) -> int | None:
    """The only dimension over which an expression sums a variable; None if it does not."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or called_name(call) != "sum":
            continue
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_method = isinstance(owner, ast.Name) and owner.id == name
        given = call.args if is_method else call.args[1:]
        is_it = is_method or (bool(call.args) and ast.unparse(call.args[0]) == name)
        named = [each.value for each in call.keywords if each.arg in ("dim", "axis")]
        dims = [*named, *given][:1]
        text = ast.unparse(dims[0]) if is_it and dims else ""
        return int(text) if text.lstrip("-").isdigit() else None
    return None


def _product(found: Iterated, file: str) -> tuple[str, Source] | None:
    """The product ``alpha @ trans`` of the loop; None if there is none, or one from the left."""
    tree = tree_of_file(file)
    right: list[tuple[str, Source]] = []
    for statement in () if tree is None else ast.walk(tree):
        if not isinstance(statement, (ast.Assign, ast.AugAssign)):
            continue
        for one, other, text in _products(statement) if statement.lineno in found.inside else ():
            depends = [not found.made_of_it.isdisjoint(names_in(x)) for x in (one, other)]
            if depends[1]:
                return None
            if depends[0]:
                right.append((text, source_of(statement, file)))
    return right[0] if right else None


def _products(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr, str]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.left, node.right, ast.unparse(node)
        elif isinstance(node, ast.Call) and called_name(node) in _PRODUCTS:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            operands = node.args if len(node.args) == 2 else [*filter(None, [owner]), *node.args]
            if len(operands) == 2:
                yield operands[0], operands[1], ast.unparse(node)
