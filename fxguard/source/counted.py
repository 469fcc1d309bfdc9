"""Where a program divides counts: the statement that made relative frequencies, by its text.

Knows nothing of torch. Where the text does not tell, nothing is a count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import (
    assignment_of,
    function_around,
    handed_on_by,
    source_of,
    statement_node,
)
from fxguard.source.named import called_name, first_argument
from fxguard.source.syntax import expression_of, tree_of_file

__all__ = ["are_counted_at", "are_indicators_at", "divided_at"]

MOST_STEPS = 8  # from a name to what gave it its value

_COUNTERS = frozenset(
    ["bincount", "histc", "histogram", "histogramdd", "histogram2d", "unique", "value_counts"]
)
_ADDERS = frozenset(["index_add", "scatter_add"])  # as called_name has them
_DIVIDES = frozenset(["div", "divide", "true_divide"])
_INDICATORS = frozenset(
    ["eq", "ge", "gt", "isin", "le", "logical_and", "logical_or", "lt", "ne", "one_hot"]
)

_Found = tuple[ast.expr, Source]


def divided_at(text: str, read_at: Source) -> Source | None:
    """The statement that divided counts by a number, as an expression of a line reads them.

    Args:
        text: the expression, ``self.prob[items]``; "" for the value that the statement assigns.
        read_at: the line.

    Returns:
        None if it is not certain that there is one.
    """
    for node, at in _made_of(_expression(text, read_at), read_at):
        if _is_quotient(node) and (top := _dividend(node)) is not None:
            return at if any(_counts(*each) for each in _made_of(top, at)) else None
        is_mean = isinstance(node, ast.Call) and called_name(node) == "mean"
        if is_mean and isinstance(node, ast.Call) and _is_of_indicators(node, at):
            return at
    return None


def are_counted_at(source: Source) -> bool:
    """Whether a statement assigns what counts something, as ``n = torch.bincount(x).float()``."""
    return any(_counts(*each) for each in _made_of(_expression("", source), source))


def are_indicators_at(source: Source) -> bool:
    """Whether a statement compares something, as ``(x == k).float().mean(0)``."""
    statement = statement_node(source)
    return statement is not None and any(map(_is_indicator, ast.walk(statement)))


def _dividend(node: ast.expr) -> ast.expr | None:
    """The dividend of a quotient."""
    if isinstance(node, ast.BinOp):
        return node.left
    return first_argument(node) if isinstance(node, ast.Call) else None


def _expression(text: str, source: Source) -> ast.expr | None:
    if not text:
        statement = statement_node(source)
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
            return statement.value
        return _registered(statement) if isinstance(statement, ast.Expr) else None
    return expression_of(text)


def _made_of(node: ast.expr | None, at: Source) -> Iterator[_Found]:
    """An expression behind names, attributes and what only hands numbers on, each with its line."""
    for _ in range(MOST_STEPS):
        if node is None:
            return
        yield node, at
        inner = handed_on_by(node)
        if inner is not None:
            node = inner
            continue
        found = None
        if isinstance(node, ast.Name):
            found = assignment_of(node.id, at)
        elif isinstance(node, ast.Attribute):
            found = _attribute(node.attr, at)
        if found is None or found.position == at.position:
            return
        node, at = _expression("", found), found


def _attribute(name: str, at: Source) -> Source | None:
    """The only statement of a file that gives an attribute, or a buffer, of that name its value."""
    tree = tree_of_file(at.file)
    found = [
        node
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))
        if _gives_attribute(node, name)
    ]
    return source_of(found[0], at.file) if len(found) == 1 else None


def _gives_attribute(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.Expr):
        call = node.value
        is_buffer = isinstance(call, ast.Call) and called_name(call) == "register_buffer"
        given = call.args if is_buffer and isinstance(call, ast.Call) else []
        return bool(given) and isinstance(given[0], ast.Constant) and given[0].value == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in targets)


def _registered(statement: ast.Expr) -> ast.expr | None:
    """What a buffer is registered with."""
    call = statement.value
    if not isinstance(call, ast.Call) or called_name(call) != "register_buffer":
        return None
    return call.args[1] if len(call.args) > 1 else None


def _is_quotient(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div)
    return isinstance(node, ast.Call) and called_name(node) in _DIVIDES


def _counts(node: ast.expr, at: Source) -> bool:
    """Whether an expression counts something, or what it names is added up in another line."""
    if isinstance(node, ast.Call):
        name = called_name(node)
        is_sum = name == "sum" and _is_of_indicators(node, at)
        return name in _COUNTERS | _ADDERS or is_sum
    is_named = isinstance(node, (ast.Attribute, ast.Name))
    return is_named and any(_adds_to(each, node) for each in ast.walk(function_around(at)))


def _adds_to(node: ast.AST, to: ast.expr) -> bool:
    """``n.index_add_(...)``, ``np.add.at(n, i, 1)``, ``n[i] += 1``."""
    if isinstance(node, ast.AugAssign):
        target, value = node.target, node.value
        is_one = isinstance(value, ast.Constant) and value.value == 1
        is_entry = isinstance(target, ast.Subscript) and _are_same(target.value, to)
        return is_entry and is_one and isinstance(node.op, ast.Add)
    if not isinstance(node, ast.Call):
        return False
    is_at = isinstance(node.func, ast.Attribute) and node.func.attr == "at"
    is_adder = called_name(node) in _ADDERS or (is_at and "add" in ast.unparse(node.func))
    first = first_argument(node)
    if is_at and node.args:
        first = node.args[0]
    return is_adder and first is not None and _are_same(first, to)


def _are_same(one: ast.expr, other: ast.expr) -> bool:
    return ast.unparse(one) == ast.unparse(other)


def _is_of_indicators(call: ast.Call, at: Source) -> bool:
    """A sum or a mean of what is 0 or 1."""
    return any(_is_indicator(node) for node, _ in _made_of(first_argument(call), at))


def _is_indicator(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return called_name(node) in _INDICATORS
    return isinstance(node, ast.Compare)
