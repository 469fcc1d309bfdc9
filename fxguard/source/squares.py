"""What a statement squares, or takes ``abs`` of: ``pcm`` of ``(pcm * pcm).sum()``."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, statement_at, statement_node
from fxguard.source.named import called_name, first_argument, variables_in
from fxguard.source.syntax import tree_of

__all__ = ["magnitude_at", "square_at", "square_in"]

SQUARES = ("square", "pow")
CONVERSIONS = ("double", "float", "half", "to", "type")


def square_at(source: Source) -> tuple[str, Source] | None:
    """What a line squares, or the statements that gave its variables their values; and the line.

    Args:
        source: the line.
    """
    code = statement_at(source)
    if squared := square_in(code):
        return squared, source
    for name in sorted(variables_in(code)):
        made = assignment_of(name, source)
        squared = "" if made is None else square_in(statement_at(made))
        if made is not None and squared:
            return squared, made
    return None


def magnitude_at(source: Source) -> tuple[str, Source] | None:
    """The integers whose magnitude a line converts, or divides by a number; and the line of abs."""
    tree = tree_of(statement_at(source))
    nodes = [] if tree is None else list(ast.walk(tree))
    converted = [x for node in nodes if (x := _converted(node)) is not None]
    if found := _only_magnitude(converted):
        return found, source
    for name in (each.id for each in converted if isinstance(each, ast.Name)):
        made = assignment_of(name, source)
        statement = None if made is None else statement_node(made)
        if made is not None and isinstance(statement, ast.Assign):
            found = _only_magnitude([statement.value])
            return (found, made) if found else None
    return None


def _converted(node: ast.AST) -> ast.expr | None:
    """``x`` of ``x.float()`` and ``x / 32768``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left
    if isinstance(node, ast.Call) and called_name(node) in CONVERSIONS:
        return first_argument(node)
    return None


def _only_magnitude(nodes: Sequence[ast.expr]) -> str:
    calls = [each for each in nodes if isinstance(each, ast.Call) and called_name(each) == "abs"]
    given = {ast.unparse(x) for call in calls if (x := first_argument(call)) is not None}
    return given.pop() if len(given) == 1 else ""


def square_in(code: str) -> str:
    """What a statement squares; "" if nothing, or several things.

    Example:
        >>> square_in("power = (pcm * pcm).sum() / n")
        'pcm'
        >>> square_in("energy = frames.pow(2).mean()"), square_in("y = a * b")
        ('frames', '')
    """
    tree = tree_of(code)
    found = {text for node in ast.walk(tree) if (text := _squared(node))} if tree else set()
    return found.pop() if len(found) == 1 else ""


def _squared(node: ast.AST) -> str:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        return left if left == right else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.unparse(node.left) if _is_two(node.right) else ""
    if isinstance(node, ast.Call) and called_name(node) in SQUARES:
        base = first_argument(node)
        is_square = called_name(node) == "square" or any(map(_is_two, node.args))
        return ast.unparse(base) if base is not None and is_square else ""
    return ""


def _is_two(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 2
