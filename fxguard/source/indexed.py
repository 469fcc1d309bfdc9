"""By which index a statement gathers or groups: ``dst`` of ``total.index_add_(0, dst, e)``.

Knows nothing of torch. Where the text does not tell, there is no index.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, function_around, statement_node
from fxguard.source.named import called_name

__all__ = ["Index", "index_at", "is_maximum_at"]

MOST_STEPS = 8  # from a name to what gave it its value

# The place of the index among the arguments of a method; a function has its tensor before it.
_PLACES = {
    "gather": 1,
    "index_add": 1,
    "index_reduce": 1,
    "index_select": 1,
    "scatter": 1,
    "scatter_add": 1,
    "scatter_reduce": 1,
    "take_along_dim": 0,
}
_SHAPED = frozenset(["broadcast_to", "clone", "contiguous", "cpu", "cuda", "detach", "expand",
                     "expand_as", "flatten", "int", "long", "repeat", "reshape", "squeeze", "to",
                     "unsqueeze", "view", "view_as"])  # fmt: skip
_MAXIMA = ("amax", "max", "maximum")


@dataclass(frozen=True, slots=True)
class Index:
    """An index as a line has it."""

    text: str  # "dst"
    meaning: str  # what it is behind names and shapes: "edges[1]"
    function: int  # the line where the function around it begins; 0 for none


def index_at(source: Source, name: str, of: str = "") -> Index | None:
    """The index by which a statement gathers or groups; None if that is not certain.

    Args:
        source: its line.
        name: of the operation, ``index_add``; ``getitem`` for ``top[dst]``.
        of: the variable that is indexed, for a statement that indexes several.
    """
    statement = statement_node(source)
    if statement is None:
        return None
    found = list(_indices(statement, name))
    named = [node for owner, node in found if of and owner == of]
    texts = {ast.unparse(_unshaped(node)): node for node in named or [node for _, node in found]}
    if len(texts) != 1:
        return None
    text, node = texts.popitem()
    meaning = _meaning(node, source)
    function = getattr(function_around(source), "lineno", 0)
    return None if meaning is None else Index(text, meaning, function)


def is_maximum_at(source: Source) -> bool:
    """Whether a statement asks for a maximum, as in ``scatter_reduce(0, i, x, "amax")``."""
    statement = statement_node(source)
    nodes = () if statement is None else ast.walk(statement)
    return any(isinstance(each, ast.Constant) and each.value in _MAXIMA for each in nodes)


def _indices(statement: ast.stmt, name: str) -> Iterator[tuple[str, ast.expr]]:
    """What is indexed, and by what."""
    for node in ast.walk(statement):
        if name == "getitem" and isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            kept = [each for each in parts if not isinstance(each, (ast.Slice, ast.Constant))]
            if len(kept) == 1 and isinstance(node.ctx, ast.Load):
                yield ast.unparse(node.value), kept[0]
        elif isinstance(node, ast.Call) and called_name(node) == name and name in _PLACES:
            yield from _given(node, _PLACES[name])


def _given(call: ast.Call, place: int) -> Iterator[tuple[str, ast.expr]]:
    """The same of a call."""
    owner, args = "", list(call.args)
    if isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value)
    if owner in ("", "torch"):
        owner = "" if not args else ast.unparse(args.pop(0))
    named = {each.arg: each.value for each in call.keywords}
    index = named.get("index", args[place] if place < len(args) else None)
    if index is not None:
        yield owner, index


def _unshaped(node: ast.expr) -> ast.expr:
    """What an expression only moves: ``dst`` of ``dst[:, None].expand_as(x)``."""
    while True:
        if isinstance(node, ast.Subscript) and _is_shape(node.slice):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _SHAPED
        ):
            node = node.func.value
        else:
            return node


def _is_shape(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return all(
        (isinstance(each, ast.Constant) and each.value in (None, ...))
        or (isinstance(each, ast.Slice) and each.lower is each.upper is each.step is None)
        for each in parts
    )


def _meaning(node: ast.expr, at: Source) -> str | None:
    """What an index is, behind names: ``edges[1]`` of ``dst``; None if it is computed."""
    for _ in range(MOST_STEPS):
        node = _unshaped(node)
        if not isinstance(node, ast.Name):
            break
        made = assignment_of(node.id, at)
        statement = None if made is None else statement_node(made)
        inner = _given_by(statement, node.id)
        if made is None or inner is None or made.line == at.line:
            return node.id
        following, at = _unshaped(inner), made
        if not _is_plain(following):
            return node.id
        node = following
    return ast.unparse(node) if _is_plain(node) else None


def _given_by(statement: ast.stmt | None, name: str) -> ast.expr | None:
    """What a statement assigns to a variable, also one of several: ``e[1]`` of ``a, b = e``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        return value
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    names = [each.id if isinstance(each, ast.Name) else "" for each in target.elts]
    if name not in names:
        return None
    place = names.index(name)
    if isinstance(value, (ast.Tuple, ast.List)):
        return value.elts[place] if len(value.elts) == len(names) else None
    return ast.Subscript(value, ast.Constant(place), ast.Load()) if _is_plain(value) else None


def _is_plain(node: ast.expr) -> bool:
    """A variable, an attribute, or an entry of one: nothing that is computed."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)
