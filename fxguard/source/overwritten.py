"""Differences from what was just overwritten, which are 0: ``seen[i] = t; gap = t - seen[i]``.

By the program's text. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import handed_on_by, source_of
from fxguard.source.syntax import tree_of_file

__all__ = ["Overwritten", "difference_behind"]

_CASTS = ("float", "int", "tensor", "as_tensor")


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A difference that is 0: its name, what was overwritten with what, and both statements."""

    name: str
    source: Source
    target: str
    value: str
    written_at: Source


def difference_behind(text: str, source: Source) -> Overwritten | None:
    """The difference that is 0 of which a variable, or an entry of one, is computed.

    Args:
        text: of the variable: ``self.gap[items]``.
        source: the line that reads it.
    """
    tree = tree_of_file(source.file)
    name = text.partition("[")[0].strip()
    for body in () if tree is None else _bodies(tree):
        for difference in _differences(body, source.file):
            is_it = difference.name == name
            if is_it or any(_is_made_of(each, name, difference.name) for each in body):
                return difference
    return None


def _bodies(tree: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _differences(body: Sequence[ast.stmt], file: str) -> Iterator[Overwritten]:
    """The differences of a block that are 0: neither side is written between."""
    written: dict[str, tuple[str, ast.stmt]] = {}  # what holds what since which statement
    for each in body:
        targets = each.targets if isinstance(each, ast.Assign) else []
        simple = len(targets) == 1 and not isinstance(targets[0], (ast.Tuple, ast.List))
        if not isinstance(each, ast.Assign) or not simple:
            if not isinstance(each, (ast.Expr, ast.Pass, ast.Assert)):
                written.clear()
            continue
        target, value = ast.unparse(targets[0]), each.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
            sides = ast.unparse(value.left), ast.unparse(value.right)
            for held, other in (sides, sides[::-1]):
                kept, statement = written.get(held, ("", each))
                if kept == other and target not in sides:
                    at, made = source_of(each, file), source_of(statement, file)
                    yield Overwritten(target, at, held, other, made)
        base = target.partition("[")[0]
        written = {
            held: (kept, at)
            for held, (kept, at) in written.items()
            if base != held.partition("[")[0] and base not in _names(f"{held}, {kept}")
        }
        if isinstance(targets[0], (ast.Subscript, ast.Attribute)):
            written[target] = (ast.unparse(_converted(value)), each)


def _names(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    return {ast.unparse(x) for x in nodes if isinstance(x, (ast.Name, ast.Attribute))}


def _converted(node: ast.expr) -> ast.expr:
    """What an expression only converts: ``step`` of ``float(step)``."""
    while isinstance(node, ast.Call):
        is_cast = isinstance(node.func, ast.Name) and node.func.id in _CASTS and len(node.args) == 1
        inner = node.args[0] if is_cast else handed_on_by(node)
        if inner is None:
            return node
        node = inner
    return node


def _is_made_of(statement: ast.stmt, name: str, other: str) -> bool:
    """Whether a statement writes a variable, or a part of it, and computes that of another one."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    value = getattr(statement, "value", None)
    is_written = any(ast.unparse(each).partition("[")[0] == name for each in targets)
    return is_written and value is not None and other in _names(ast.unparse(value))
