"""The parts of an expression by its text: the terms of a sum, factors, the same with another sign.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from typing import TypeGuard

from fxguard.source.syntax import expression_of, tree_of

__all__ = ["factors_in", "negated", "terms_in"]


def terms_in(code: str) -> list[str]:
    """The terms of the only sum of a line, in their order; [] where it has several, or none.

    Example:
        >>> terms_in("h.append(omega + alpha * e ** 2 + beta * h[-1])")
        ['omega', 'alpha * e ** 2', 'beta * h[-1]']
    """
    tree = tree_of(code)
    sums = [node for node in (() if tree is None else ast.walk(tree)) if _is_addition(node)]
    inner = [node.left for node in sums]
    outermost = [node for node in sums if node not in inner]
    if len(outermost) != 1:
        return []
    terms: list[ast.expr] = []
    node: ast.expr = outermost[0]
    while _is_addition(node):
        terms, node = [node.right, *terms], node.left
    return [ast.unparse(each) for each in (node, *terms)]


def factors_in(text: str) -> list[str]:
    """The factors of a product; [] of anything else.

    Example:
        >>> factors_in("alpha * e ** 2")
        ['alpha', 'e ** 2']
    """
    node = expression_of(text)
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return []
    return [ast.unparse(node.left), ast.unparse(node.right)]


def negated(text: str) -> str:
    """An expression with the other sign.

    Example:
        >>> negated("x"), negated("-x / 2"), negated("c / (k * t)"), negated("a - b")
        ('-x', 'x / 2', '-c / (k * t)', 'b - a')
    """
    node = expression_of(text)
    return f"-({text})" if node is None else ast.unparse(_negated(node))


def _negated(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        return ast.BinOp(_negated(node.left), node.op, node.right)
    return ast.UnaryOp(ast.USub(), node)


def _is_addition(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
