"""Numbers of a program that are next to 1, such as ``1 - EPS``: a dtype may hold 1 in their place.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import source_of
from fxguard.source.syntax import tree_of_file

__all__ = ["NearOne", "near_ones"]

MOST_NAMES = 4  # from an expression back to numbers

# Calls that bound what they are given, or choose a bound in its place.
BOUNDS = frozenset(
    [
        *("clamp", "clamp_", "clamp_max", "clamp_min", "clip", "clip_", "fmin", "hardtanh", "max"),
        *("maximum", "min", "minimum", "renorm", "renorm_", "where"),
    ]
)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class NearOne:
    """A number next to 1 or -1.

    Attributes:
        text: as the program has it, ``1 - EPS``.
        distance: from 1, or from -1.
        is_negative: whether it is next to -1.
        source: the statement that has it.
    """

    text: str
    distance: float
    is_negative: bool
    source: Source


def near_ones(file: str, distance: float) -> list[NearOne]:
    """The numbers of a file that are so near to 1 or -1, and not 1, in the file's order.

    Example:
        ``1 - EPS``, where the module says ``EPS = 1e-8``.
    """
    tree = tree_of_file(file)
    if tree is None:
        return []
    return [
        found
        for node, statement in _expressions(tree)
        if (found := _near(node, tree, source_of(statement, file))) is not None
        and 0 < found.distance <= distance
        and (isinstance(node, ast.BinOp) or _is_bound(node, statement, tree))
    ]


def _is_bound(number: ast.expr, statement: ast.stmt, tree: ast.Module) -> bool:
    """Whether a number, or the variable that holds it, bounds something, or scales to a length."""
    if _bounds(number, statement):
        return True
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is number:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {ast.unparse(each) for each in targets}
    elif isinstance(statement, _FUNCTIONS):
        names = {each.arg for each in ast.walk(statement.args) if isinstance(each, ast.arg)}
    else:
        return False
    return any(
        _bounds(node, each)
        for each in ast.walk(tree)
        if isinstance(each, ast.stmt) and not hasattr(each, "body")
        for node in ast.walk(each)
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names
    )


def _bounds(number: ast.expr, statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            parts = [*node.args, *(x.value for x in node.keywords)] if name in BOUNDS else []
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
            is_length = isinstance(node.op, ast.Div) or any(
                isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div)
                for each in (node.left, node.right)
            )
            parts = [node.left, node.right] if is_length else []
            parts = parts[:1] if isinstance(node.op, ast.Div) else parts
        if any(each is number for each in parts):
            return True
    return False


def _expressions(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """The expressions that may be such a number, each with its statement."""
    todo: list[tuple[ast.AST, ast.stmt | None]] = [(tree, None)]
    while todo:
        node, statement = todo.pop(0)
        statement = node if isinstance(node, ast.stmt) else statement
        if statement is not None and isinstance(node, (ast.BinOp, ast.Constant)):
            yield node, statement
        todo += [(each, statement) for each in ast.iter_child_nodes(node)]


def _near(node: ast.expr, tree: ast.Module, source: Source) -> NearOne | None:
    text = _text(node, source.file)
    if isinstance(node, ast.Constant):
        value = _number(node, tree, node.lineno)
        distance = math.inf if value is None else 1 - value
        return NearOne(text, distance, is_negative=False, source=source)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = (_number(each, tree, node.lineno) for each in (node.left, node.right))
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Sub) and left == 1:
        return NearOne(text, right, is_negative=False, source=source)
    if isinstance(node.op, ast.Add) and -1 in (left, right):
        return NearOne(text, max(left, right), is_negative=True, source=source)
    if isinstance(node.op, ast.Div) and left == 1:
        return NearOne(text, 1 - 1 / right if right else math.inf, is_negative=False, source=source)
    return None


def _text(node: ast.expr, file: str) -> str:
    """An expression as the program has it."""
    line = linecache.getline(file, node.lineno)
    is_plain = node.end_lineno == node.lineno and line.isascii()
    return line[node.col_offset : node.end_col_offset] if is_plain else ast.unparse(node)


def _number(node: ast.expr, tree: ast.Module, line: int, depth: int = 0) -> float | None:
    """The number that an expression is, as far as the text tells."""
    if isinstance(node, ast.Constant):
        value = node.value
        return float(value) if isinstance(value, (int, float)) and value is not True else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand, tree, line, depth)
        return None if value is None else -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult, ast.Pow)):
        pair = [_number(each, tree, line, depth) for each in (node.left, node.right)]
        return _together(node.op, pair[0], pair[1])
    if isinstance(node, (ast.Name, ast.Attribute)) and depth < MOST_NAMES:
        values = list(_values(node, tree, line))
        found = {_number(each, tree, line, depth + 1) for each in values}
        return found.pop() if len(found) == 1 else None
    return None


def _together(sign: ast.operator, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    if isinstance(sign, ast.Pow):
        is_small = abs(right) < 64 and 0 < abs(left) <= 1e3
        return float(left**right) if is_small and (left > 0 or right % 1 == 0) else None
    return left * right if isinstance(sign, ast.Mult) else left + right


def _values(node: ast.Name | ast.Attribute, tree: ast.Module, line: int) -> Iterator[ast.expr]:
    """What a program assigns to a variable or an attribute, or gives to a parameter by default."""
    text = ast.unparse(node)
    around = [x for x in ast.walk(tree) if isinstance(x, _FUNCTIONS) and _holds(x, line)]
    for function in reversed(around):
        own = list(_defaults(function, text, tree)) + list(_assigned(function, text))
        if own:
            yield from own
            return
    is_own = isinstance(node, ast.Attribute)  # an attribute is assigned in some method
    yield from _assigned(tree, text) if is_own else _assigned_in(tree.body, text)
    for each in ast.walk(tree) if is_own else ():
        if isinstance(each, ast.ClassDef) and isinstance(node, ast.Attribute):
            yield from _assigned_in(each.body, node.attr)


def _defaults(function: ast.AST, name: str, tree: ast.Module) -> Iterator[ast.expr]:
    """The default of a parameter, and what calls give in its place."""
    if not isinstance(function, _FUNCTIONS):
        return
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = list(zip(named[::-1], arguments.defaults[::-1], strict=False))
    defaults += [
        (x, y)
        for x, y in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if y is not None
    ]
    yield from (value for each, value in defaults if each.arg == name)
    position = next((i for i, each in enumerate(named) if each.arg == name), None)
    for node in ast.walk(tree) if position is not None else ():
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        is_method = bool(named) and named[0].arg == "self"
        if called != function.name:
            continue
        yield from (each.value for each in node.keywords if each.arg == name)
        given = node.args[(position or 0) - is_method :]
        yield from given[:1]


def _assigned(tree: ast.AST, text: str) -> Iterator[ast.expr]:
    yield from _assigned_in([each for each in ast.walk(tree) if isinstance(each, ast.stmt)], text)


def _assigned_in(body: list[ast.stmt], text: str) -> Iterator[ast.expr]:
    for each in body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        value = getattr(each, "value", None)
        for target in targets:
            names, values = [target], [value]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                names, values = list(target.elts), list(value.elts)
            for name, found in zip(names, values, strict=False):
                is_it = isinstance(name, ast.expr) and ast.unparse(name) == text
                if is_it and isinstance(found, ast.expr):
                    yield found


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
