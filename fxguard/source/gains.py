"""Gains that a recursion of covariances adds where it has to subtract them: a sign, by its text.

``K = solve(S, B.T @ P @ A)`` and then ``P = Q + A.T @ P @ A + A.T @ P @ B @ K``, as Riccati's and
Kalman's equations have it with a minus. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from fxguard.records import Source
from fxguard.source._recurrences import names_in
from fxguard.source.assigned import source_of
from fxguard.source.iterated import Iterated
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["added_gain"]

_TRANSPOSED = ("H", "T", "mH", "mT")
_TURNS = ("t", "transpose", "adjoint", "squeeze", "unsqueeze")
_SOLVES = ("cholesky_solve", "solve", "lstsq")
_INVERSES = ("inv", "inverse", "pinv", "cholesky_inverse")
_PRODUCTS = ("bmm", "matmul", "mm")


def added_gain(found: Iterated) -> tuple[str, str, Source] | None:
    """The term with a gain that is added, the gain, and the statement; None if there is none.

    Args:
        found: a variable that a loop computes from itself.

    Example:
        >>> added_gain(iterated_at(Source("lqr.py", 9, "P = Q + A.T @ P @ A + A.T @ P @ B @ K")))[0]
        "A.T @ P @ B @ K"
    """
    tree = tree_of_file(found.source.file)
    made = [
        (each.targets[0].id, each.value, each)
        for each in (() if tree is None else ast.walk(tree))
        if isinstance(each, ast.Assign) and each.lineno in found.inside
        if isinstance(each.targets[0], ast.Name)
    ]
    values: dict[str, list[ast.expr]] = {}
    for name, value, _ in made:
        values.setdefault(name, []).append(value)
    gains = [
        name
        for name, value, _ in made
        if _is_gain(value, values, found.made_of_it) and name in found.made_of_it
    ]
    for name, value, statement in made:
        if name not in found.made_of_it or name in gains:
            continue
        for term in _added(value):
            factors = [_variable(each) for each in _factors(term)]
            of_gain = [each for each in factors if each in gains]
            others = [each for each in factors if each in found.made_of_it and each not in gains]
            if len(of_gain) == 1 and len(others) == 1 and len(factors) > 2:
                return ast.unparse(term), of_gain[0], source_of(statement, found.source.file)
    return None


def _is_gain(
    value: ast.expr, values: Mapping[str, Sequence[ast.expr]], made_of_it: frozenset[str]
) -> bool:
    """Whether it divides by a matrix, both computed of the variable, and keeps the sign."""
    if isinstance(value, ast.Call) and called_name(value) in _SOLVES:
        return not made_of_it.isdisjoint(names_in(value)) and not any(map(_is_negative, value.args))
    factors = list(_factors(value))
    divides = any(_is_inverse(each, values) for each in factors)
    is_of_it = any(not made_of_it.isdisjoint(names_in(each)) for each in factors)
    return len(factors) > 1 and divides and is_of_it and not any(map(_is_negative, factors))


def _is_inverse(node: ast.expr, values: Mapping[str, Sequence[ast.expr]]) -> bool:
    if isinstance(node, ast.Name) and len(values.get(node.id, ())) == 1:
        node = values[node.id][0]
    return isinstance(node, ast.Call) and called_name(node) in _INVERSES


def _is_negative(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _added(node: ast.expr, *, plus: bool = True) -> Iterator[ast.expr]:
    """The terms of a sum that are added."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield from _added(node.left, plus=plus)
        yield from _added(node.right, plus=plus == isinstance(node.op, ast.Add))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _added(node.operand, plus=not plus)
    elif plus:
        yield node


def _factors(node: ast.expr) -> Iterator[ast.expr]:
    """The factors of a product of matrices."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    elif isinstance(node, ast.Call) and called_name(node) in _PRODUCTS:
        for each in node.args:
            yield from _factors(each)
    else:
        yield node


def _variable(node: ast.expr) -> str:
    """The variable that a factor is, perhaps transposed; "" if it is something else."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr in _TRANSPOSED:
            node = node.value
        elif isinstance(node, ast.Call) and called_name(node) in _TURNS:
            node = node.func.value if isinstance(node.func, ast.Attribute) else node
            if isinstance(node, ast.Call):
                return ""
        else:
            return node.id if isinstance(node, ast.Name) else ""
