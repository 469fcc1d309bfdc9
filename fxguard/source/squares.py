"""What a statement squares: ``pcm`` of ``(pcm * pcm).sum()``, ``x[i] ** 2`` and ``x.square()``."""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, statement_at
from fxguard.source.named import called_name, first_argument, variables_in
from fxguard.source.syntax import tree_of

__all__ = ["square_at", "square_in"]

SQUARES = ("square", "pow")


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
