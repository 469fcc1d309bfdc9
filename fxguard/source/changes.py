"""Variables that hold how much another one has changed since the turn before, and who divides by
them.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds, source_of, statement_node
from fxguard.source.iterated import loops_around
from fxguard.source.syntax import tree_of

__all__ = ["change_at", "quotients_by", "quotients_in_turn"]

EARLIER = re.compile(r"(^|_)(prev|previous|old|last|before)(_|\d*$)|(prev|old)$")
OF_ONE = frozenset(["abs", "item", "pow", "reshape", "square", "squeeze", "sum", "t", "view"])
PRODUCTS = frozenset(["dot", "inner", "matmul", "mm", "mul", "multiply", "mv", "vdot"])

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def change_at(source: Source, text: str = "", read: str = "") -> tuple[str, str]:
    """``y`` and ``g`` of ``y = g - self.prev[1]``, where the program puts ``g`` into ``self.prev``.

    Args:
        source: the line of a difference.
        text: the difference itself, where it has no name.
        read: what is computed of it, ``s @ s``: tells which of several that a line assigns it is.

    Returns:
        "" and "" where the numbers are not known to be those of an earlier turn.
    """
    statement, tree = statement_node(source), tree_of(text)
    value = getattr(tree.body[0], "value", None) if tree is not None and tree.body else None
    name = text
    if not _is_difference(value):
        is_assigned = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        is_only = statement is not None and sum(map(_is_difference, ast.walk(statement))) == 1
        value = statement.value if isinstance(statement, ast.Assign) and is_only else None
        name = ast.unparse(target) if is_assigned and target and _is_name(target) else ""
        if value is None and statement is not None and (found := _read_in(read, statement)):
            name, value = found
    if not _is_difference(value) or not name:
        return "", ""
    function = function_around(source)
    for one, other in ((value.left, value.right), (value.right, value.left)):
        if _is_earlier(function, other, one):
            return name, ast.unparse(one)
    return "", ""


def _read_in(read: str, statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """The only variable of ``s, y = x - x_old, g - g_old`` that an expression reads."""
    tree = tree_of(read)
    names = set() if tree is None else {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    found = [
        (target.id, value)
        for target, value in _pairs(statement)
        if isinstance(target, ast.Name) and target.id in names and _is_difference(value)
    ]
    return found[0] if len(found) == 1 else None


def quotients_by(name: str, source: Source) -> list[Source]:
    """The statements of a function that divide by a product with a variable: ``a / (s @ y)``.

    Args:
        name: of the variable, or the text of an expression.
        source: a line of the function.
    """
    statements = list(_simple(function_around(source)))
    zeros = {name}
    for each in statements:
        value = getattr(each, "value", None)
        if isinstance(each, ast.Assign) and value is not None and _is_zero(value, zeros):
            zeros.update(ast.unparse(x) for x in each.targets if _is_name(x))
    return [
        source_of(each, source.file)
        for each in statements
        if any(_is_zero(below, zeros) for below in _divisors(each))
    ]


def quotients_in_turn(name: str, source: Source) -> list[Source]:
    """The same, of the innermost loop around a line and without that line; [] outside of loops."""
    loops = loops_around(function_around(source), source.line)
    found = quotients_by(name, source) if loops else []
    return [x for x in found if holds(loops[-1], x.line) and x.line != source.line]


def _is_difference(node: Any) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute))


def _base(node: ast.expr) -> ast.expr:
    """``self.prev`` of ``self.prev[1].clone()``."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node


def _is_earlier(function: ast.AST, node: ast.expr, now: ast.expr) -> bool:
    """Whether an expression holds what another one was in the turn before."""
    kept, later = _base(node), _base(now)
    if not (_is_name(kept) and _is_name(later)):
        return False
    last = kept.attr if isinstance(kept, ast.Attribute) else ast.unparse(kept)
    if EARLIER.search(last):
        return True
    text = ast.unparse(later)
    for each in _simple(function):
        for target, value in _pairs(each):
            is_kept = ast.unparse(_base(target)) == ast.unparse(kept)
            if is_kept and any(ast.unparse(x) == text for x in _handed_on(value)):
                return True
    return False


def _pairs(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement assigns, each with its value."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        if isinstance(called, ast.Attribute) and called.attr == "copy_" and statement.value.args:
            yield called.value, statement.value.args[0]
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        elif value is not None:
            yield target, value


def _handed_on(value: ast.expr) -> Iterator[ast.expr]:
    """The variables that a value is, or that a tuple holds: ``g`` of ``(x.clone(), g)``."""
    if isinstance(value, (ast.Tuple, ast.List)):
        for each in value.elts:
            yield _base(each)
    else:
        yield _base(value)


def _simple(node: ast.AST) -> Iterator[ast.stmt]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, _SCOPES):
            continue
        if isinstance(each, ast.stmt) and not hasattr(each, "body"):
            yield each
        else:
            yield from _simple(each)


def _divisors(statement: ast.stmt) -> Iterator[ast.expr]:
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        if isinstance(node, ast.Call) and node.args and _name_of(node) == "div":
            yield node.args[-1]


def _name_of(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_zero(node: ast.expr, zeros: set[str]) -> bool:
    """Whether an expression is 0 where one of some others is."""
    if ast.unparse(node) in zeros:
        return True
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Mult, ast.MatMult)):
            return _is_zero(node.left, zeros) or _is_zero(node.right, zeros)
        return isinstance(node.op, (ast.Div, ast.Pow)) and _is_zero(node.left, zeros)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, owner = node.func.attr, node.func.value
        if name in PRODUCTS:
            return any(_is_zero(each, zeros) for each in (owner, *node.args))
        return name in OF_ONE and any(_is_zero(each, zeros) for each in (owner, *node.args[:1]))
    return False
