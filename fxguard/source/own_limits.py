"""Quotients of two zeros in a backward that a script wrote: what they are near to there.

Both sides are computed in Python, from numbers near to where they are 0, by the texts of the
function's forward and backward. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds, source_of
from fxguard.source.scalar_functions import MODULES, NO_NUMBER, number_in
from fxguard.source.syntax import tree_of_file

__all__ = ["OwnLimit", "limit_in_backward"]

NEAR = 1e-3
ROUNDINGS = 1e-3
MOST_NAMES = 64  # in one expression
SEEDS = (0.3, 0.8)


@dataclass(frozen=True, slots=True)
class OwnLimit:
    """A quotient in a backward, of which both sides are 0 somewhere.

    Attributes:
        text: of the quotient, ``y / x``.
        name: what is a number there, ``x``.
        at: that number.
        limit: what the quotient is near to there.
        factor: what the quotient is everywhere, ``torch.sigmoid(x)``; "" if that is not known.
        product: what its dividend was made as, ``x * torch.sigmoid(x)``; "" without a factor.
        made: the statement that made it.
    """

    text: str
    name: str
    at: float
    limit: float
    factor: str
    product: str
    made: Source | None


def limit_in_backward(source: Source) -> OwnLimit | None:
    """The quotient of two zeros at a line of a backward; None if it has no limit, or is unclear."""
    tree, backward = tree_of_file(source.file), function_around(source)
    forward = None if tree is None else _forward_of(backward, tree)
    if forward is None or not isinstance(backward, ast.FunctionDef):
        return None
    values = _Values(forward, backward)
    statements = [x for x in ast.walk(backward) if isinstance(x, ast.stmt) and _is_at(x, source)]
    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found = values.limit_of(node, source.file)
            if found is not None:
                return found
    return None


def _is_at(statement: ast.stmt, source: Source) -> bool:
    return holds(statement, source.line) and not hasattr(statement, "body")


def _forward_of(backward: ast.AST, tree: ast.Module) -> ast.FunctionDef | None:
    """The forward of the class that has a backward."""
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.ClassDef)):
        methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
        if any(x.name == "backward" and _is_same(x, backward) for x in methods):
            return next((x for x in methods if x.name == "forward"), None)
    return None


def _is_same(one: ast.FunctionDef, other: ast.AST) -> bool:
    return isinstance(other, ast.FunctionDef) and one.lineno == other.lineno


class _Values:
    """Expressions of a backward, as those of what its forward was given."""

    def __init__(self, forward: ast.FunctionDef, backward: ast.FunctionDef) -> None:
        self.given = [each.arg for each in forward.args.args[1:]]
        self.forward = _assigned(forward)
        self.kept = _kept(forward, backward)
        self.backward = _assigned(backward)

    def limit_of(self, node: ast.BinOp, file: str) -> OwnLimit | None:
        """The limit of a quotient where one of the forward's operands is 0, or 1."""
        sides = [self._expanded(each) for each in (node.left, node.right)]
        if sides[0] is None or sides[1] is None:
            return None
        for name in self.given:
            inside = next((x for x, y in self.kept.items() if _text(y) == name), "")
            for at in (0.0, 1.0) if inside else ():
                limit = _limit(sides[0], sides[1], name, at)
                if limit is not None:
                    factor, product, made = self._factor(node)
                    place = None if made is None else source_of(made, file)
                    return OwnLimit(
                        _text(node), inside, at, round(limit, 3) + 0.0, factor, product, place
                    )
        return None

    def _expanded(self, node: ast.expr) -> ast.expr | None:
        try:
            in_backward = _replaced(node, _values_of(self.backward))
            return _replaced(_replaced(in_backward, self.kept), _values_of(self.forward))
        except (RecursionError, ValueError):
            return None

    def _factor(self, node: ast.BinOp) -> tuple[str, str, ast.stmt | None]:
        """What remains of a product that is divided by one of its factors."""
        dividend, divisor = (self.kept.get(_text(each), each) for each in (node.left, node.right))
        made = self.forward.get(_text(dividend))
        product = getattr(made, "value", None)
        if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
            return "", "", None
        for one, other in ((product.left, product.right), (product.right, product.left)):
            read = {x.id for x in ast.walk(other) if isinstance(x, ast.Name)} - MODULES
            is_at_hand = all(_text(self.kept.get(each)) == each for each in read)
            if _text(one) == _text(divisor) and is_at_hand:
                return _text(other), _text(product), made
        return "", "", None


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _assigned(function: ast.FunctionDef) -> dict[str, ast.Assign | None]:
    """The variables of a function, each with its statement; None where it has several."""
    found: dict[str, ast.Assign | None] = {}
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                found[target.id] = None if target.id in found else node
        if isinstance(node, ast.AugAssign):
            found[ast.unparse(node.target)] = None
    return found


def _values_of(assigned: Mapping[str, ast.Assign | None]) -> dict[str, ast.expr | None]:
    return {name: None if each is None else each.value for name, each in assigned.items()}


def _kept(forward: ast.FunctionDef, backward: ast.FunctionDef) -> dict[str, ast.expr]:
    """What a backward calls that which the forward has kept, and what the forward calls it."""
    kept: dict[str, ast.expr] = {}
    saved: list[ast.expr] = []
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and _text(node.func).endswith(".save_for_backward"):
            saved = list(node.args)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(node, ast.Assign):
                kept[_text(target)] = node.value
    for node in ast.walk(backward):
        if isinstance(node, ast.Assign) and _text(node.value).endswith(".saved_tensors"):
            target = node.targets[0]
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
            kept.update(zip(map(_text, names), saved, strict=False))
    return kept


class _Replacing(ast.NodeTransformer):
    """Puts expressions in the place of variables; a variable of several values has none."""

    def __init__(self, values: Mapping[str, ast.expr | None]) -> None:
        self.values = values
        self.count = 0

    def _replace(self, node: ast.Name | ast.Attribute) -> ast.expr:
        text, self.count = ast.unparse(node), self.count + 1
        if text not in self.values:
            return node
        value = self.values[text]
        if value is None or self.count > MOST_NAMES:
            raise ValueError(text)
        return value if _text(value) == text else self.visit(value)  # type: ignore[no-any-return]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._replace(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        found = self._replace(node)
        return found if found is not node else self.generic_visit(node)  # type: ignore[return-value]


def _replaced(node: ast.expr, values: Mapping[str, ast.expr | None]) -> ast.expr:
    return _Replacing(values).visit(copy.deepcopy(node))  # type: ignore[no-any-return]


def _limit(left: ast.expr, right: ast.expr, name: str, at: float) -> float | None:
    """The limit where a variable becomes a number; None if it has none, or has several."""
    found = []
    try:
        for seed in SEEDS:
            if _number(left, name, at, seed) != 0 or _number(right, name, at, seed) != 0:
                return None
            for sign in (1, -1):
                far, near = (
                    _number(left, name, x, seed) / _number(right, name, x, seed)
                    for x in (at + sign * 2 * NEAR, at + sign * NEAR)
                )
                found.append(2 * near - far)
    except NO_NUMBER:
        return None
    is_one = max(found) - min(found) <= ROUNDINGS and all(map(math.isfinite, found))
    return found[0] if is_one else None


def _number(node: ast.expr, name: str, at: float, seed: float) -> float:
    """An expression where one variable is a number, and others are any."""

    def variable(text: str) -> float:
        return at if text == name else seed + 0.0625 * (sum(map(ord, text)) % 7)

    return number_in(node, variable)
