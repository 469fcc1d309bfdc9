"""Logarithms that a program multiplies by their own operand: ``p * (p.log() - q)``, by its text.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node
from fxguard.source.named import called_name, first_argument

__all__ = ["divergence_in", "is_weighed_at"]

LONGEST = 24  # characters of an operand that is quoted


def is_weighed_at(source: Source, log: str) -> bool:
    """Whether the statement at a line, or a later one, multiplies a logarithm by its operand.

    Args:
        source: the line of the logarithm.
        log: its plain name.
    """
    statement = statement_node(source)
    if statement is None:
        return False
    if any(True for _ in _weighed_in(statement, log)):
        return True
    names = _targets(statement)
    operands = {ast.unparse(each) for each in _operands_of(statement, log)}
    around = function_around(source)
    later = [node for node in ast.walk(around) if getattr(node, "lineno", 0) > source.line]
    products = [x for x in later if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)]
    return any(
        _matches(one, operands) and _reads(other, names)
        for each in products
        for one, other in ((each.left, each.right), (each.right, each.left))
    )


def divergence_in(source: Source) -> tuple[str, str] | None:
    """The p and the q of ``p * (p.log() - q)`` in the statement at a line; None without one.

    Example:
        ``(target * (target.log() - logq)).sum(1)`` gives ``("target", "logq")``.
    """
    statement = statement_node(source)
    if statement is None:
        return None
    found = set()
    for p, other in _weighed_in(statement, "log"):
        if isinstance(other, ast.BinOp) and isinstance(other.op, ast.Sub):
            is_log = any(ast.dump(x) == ast.dump(p) for x in _operands_of(other.left, "log"))
            is_alone = isinstance(other.left, ast.Call)
            pair = ast.unparse(p), ast.unparse(other.right)
            if is_log and is_alone and all(len(each) <= LONGEST for each in pair):
                found.add(pair)
    return found.pop() if len(found) == 1 else None


def _weighed_in(node: ast.AST, log: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The factors of each product of something with what holds its logarithm, that first."""
    for each in ast.walk(node):
        sides: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
            sides = [(each.left, each.right), (each.right, each.left)]
        elif isinstance(each, ast.Call) and called_name(each) in ("mul", "multiply"):
            first = first_argument(each)
            if first is not None and each.args:
                sides = [(first, each.args[-1]), (each.args[-1], first)]
        for one, other in sides:
            operands = {ast.unparse(x) for x in _operands_of(other, log)}
            if _matches(one, operands):
                yield one, other


def _matches(factor: ast.expr, operands: set[str]) -> bool:
    """Whether a factor, or one of a product of several, is one of some expressions."""
    text = ast.unparse(factor)
    if text in operands:
        return True
    if isinstance(factor, ast.UnaryOp):
        return _matches(factor.operand, operands)
    if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Mult):
        return _matches(factor.left, operands) or _matches(factor.right, operands)
    return False


def _operands_of(node: ast.AST, log: str) -> Iterator[ast.expr]:
    """What a node takes that logarithm of, also inside a bound or an added eps."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and called_name(each) == log:
            operand = first_argument(each)
            while operand is not None:
                yield operand
                if isinstance(operand, ast.Call) and called_name(operand) in ("clamp", "clip"):
                    operand = first_argument(operand)
                elif isinstance(operand, ast.BinOp) and isinstance(operand.right, ast.Constant):
                    operand = operand.left
                else:
                    operand = None


def _targets(statement: ast.stmt) -> set[str]:
    nodes = statement.targets if isinstance(statement, ast.Assign) else []
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _reads(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))
