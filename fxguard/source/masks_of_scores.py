"""Masks that a program makes of the very scores that they hide, as a nucleus filter does.

Knows nothing of torch. Where the text does not tell, a mask is made of something else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, statement_node, target_of
from fxguard.source.named import called_name, first_argument

__all__ = ["mask_of_scores"]

MOST_STEPS = 24  # names that are followed

_ORDERS = (ast.Gt, ast.GtE, ast.Lt, ast.LtE)
_COMPARES = frozenset(["ge", "gt", "le", "lt"])
_FILLS = frozenset(["masked_fill", "where"])
_MODULES = ("F", "nn", "torch")
# What reads a shape, a dtype or a device of its operand, and none of its numbers.
_OF_SHAPE = frozenset(["device", "dtype", "expand_as", "full_like", "len", "new_full", "new_ones",
                       "new_zeros", "ones_like", "shape", "size", "type_as", "view_as",
                       "zeros_like"])  # fmt: skip
_SCALED = (ast.Add, ast.Div, ast.Mult, ast.Sub)


def mask_of_scores(filled: Source) -> Source | None:
    """The statement that compares something made of scores, by which they are masked.

    Args:
        filled: the line that masks them, ``logits.masked_fill(drop, -inf)``.

    Returns:
        None where the mask is of something else, or that is not certain.
    """
    statement = statement_node(filled)
    found = None if statement is None else _filled(statement)
    if found is None:
        return None
    mask, scores = found
    names, compared = _names_of_scores(scores, filled), None
    is_of_scores = False
    todo, seen = [(mask, filled)], set[tuple[str, int]]()
    while todo and len(seen) <= MOST_STEPS:
        node, at = todo.pop(0)
        if any(isinstance(each, (ast.BitAnd, ast.BitOr)) for each in ast.walk(node)):
            return None  # another mask may hide the row
        compared = compared or (at if _compares(node) else None)
        for name in _read(node):
            if name in names:
                is_of_scores = True
                continue
            made = assignment_of(name, at)
            if made is None or (name, made.line) in seen:
                continue
            seen.add((name, made.line))
            inner = statement_node(made)
            if isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner.value is not None:
                todo.append((inner.value, made))
    return compared if is_of_scores else None


def _filled(statement: ast.stmt) -> tuple[ast.expr, str] | None:
    """The mask of a statement that masks something once, and the variable that it masks."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        owner = target.value
        return (target.slice, owner.id) if isinstance(owner, ast.Name) else None
    calls = [x for x in ast.walk(statement) if isinstance(x, ast.Call) and called_name(x) in _FILLS]
    if len(calls) != 1:
        return None
    call = calls[0]
    args = list(call.args)
    if called_name(call) == "where":
        scores = [each.id for each in args[1:] if isinstance(each, ast.Name)]
        return (args[0], scores[0]) if len(scores) == 1 else None
    scored = first_argument(call)
    at = 0 if bool(args) and scored is not args[0] else 1
    return (args[at], scored.id) if isinstance(scored, ast.Name) and len(args) > at else None


def _names_of_scores(name: str, at: Source) -> set[str]:
    """The variable, and those of which it is made by a factor or an offset alone."""
    names = {name}
    for _ in range(MOST_STEPS):
        made = assignment_of(name, at)
        statement = None if made is None else statement_node(made)
        if made is None or not isinstance(statement, ast.Assign) or target_of(made) != name:
            break
        value = statement.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, _SCALED):
            value = value.left
        if not isinstance(value, ast.Name) or value.id == name:
            break
        name, at = value.id, made
        names.add(name)
    return names


def _compares(node: ast.expr) -> bool:
    """Whether it compares by size, other than with 0: what is above 0 may be a mask of data."""
    for each in ast.walk(node):
        if isinstance(each, ast.Compare) and isinstance(each.ops[0], _ORDERS):
            sides = (each.left, *each.comparators)
            if not any(isinstance(side, ast.Constant) and side.value == 0 for side in sides):
                return True
        if isinstance(each, ast.Call) and called_name(each) in _COMPARES:
            return True
    return False


def _read(node: ast.AST) -> Iterator[str]:
    """The variables whose numbers an expression reads, not only a shape of them."""
    if isinstance(node, ast.Attribute) and node.attr in _OF_SHAPE:
        return
    if isinstance(node, ast.Call):
        name = called_name(node)
        if name in _OF_SHAPE:
            if name.endswith("_as") and isinstance(node.func, ast.Attribute):
                yield from _read(node.func.value)
            return
        is_of_module = isinstance(node.func, ast.Attribute) and (
            isinstance(node.func.value, ast.Name) and node.func.value.id in _MODULES
        )
        inner: list[ast.AST] = [*node.args, *(each.value for each in node.keywords)]
        if isinstance(node.func, ast.Attribute) and not is_of_module:
            inner.append(node.func.value)
        for each in inner:
            yield from _read(each)
        return
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _read(child)
