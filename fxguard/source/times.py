"""How often a line runs an operation each time that the line runs, by its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.source.named import SIGNS, called_name, is_number_of_module, is_of_numbers
from fxguard.source.syntax import tree_of

__all__ = ["is_at_one_place", "is_chain", "times_in"]

LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def times_in(code: str, name: str) -> int:
    """How often a line has an operation; 0 if unknown, as of a comprehension.

    Args:
        code: the text of the line.
        name: the plain name of the operation.

    Example:
        >>> times_in("ll = -0.5 * (math.log(2 * math.pi) + torch.log(s))", "log")
        1
        >>> times_in("x = x * 1 * 2 * 1", "mul")
        3
    """
    tree = _parsed(code)
    if tree is None or any(isinstance(node, LOOPS) for node in ast.walk(tree)):
        return 0
    return _places_in(tree, name)


def is_at_one_place(code: str, name: str) -> bool:
    """Whether a line has an operation once, however often that runs.

    Example:
        >>> is_at_one_place("new = {k: g / (v.sqrt() + eps) for k, g, v in rows}", "sqrt")
        True
    """
    tree = _parsed(code)
    return tree is not None and _places_in(tree, name) == 1


def is_chain(code: str, name: str) -> bool:
    """Whether a line applies an operation again and again to the variable that it assigns.

    Then each of its signs is an operation on tensors: ``x = x * 1 * 2`` is one, and ``x = x * (2 *
    k)`` is none.
    """
    tree = _parsed(code)
    statement = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    node: ast.expr = statement.value
    signs = 0
    while isinstance(node, ast.BinOp) and isinstance(node.op, SIGNS.get(name, ast.operator)):
        signs += 1
        node = node.left
    return signs == times_in(code, name) and ast.unparse(node) == ast.unparse(statement.targets[0])


def _parsed(code: str) -> ast.Module | None:
    texts = (code, f"{code}\n    pass", code.rstrip(","))
    return next((tree for tree in map(tree_of, texts) if tree is not None), None)


def _places_in(tree: ast.Module, name: str) -> int:
    return sum(_is_one(node, name) for node in ast.walk(tree))


def _is_one(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        is_named = isinstance(node.func, (ast.Attribute, ast.Name)) and called_name(node) == name
        return is_named and not is_of_numbers(node)
    sign = SIGNS.get(name)
    if sign is None or not isinstance(node, (ast.BinOp, ast.AugAssign)):
        return False
    return isinstance(node.op, sign) and any(map(_may_be_tensor, _operands(node)))


def _operands(node: ast.BinOp | ast.AugAssign) -> Iterator[ast.expr]:
    yield from (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)


def _may_be_tensor(node: ast.expr) -> bool:
    """Whether an expression is more than numbers and constants of a module: not ``2 * math.pi``."""
    if isinstance(node, ast.UnaryOp):
        return _may_be_tensor(node.operand)
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return any(map(_may_be_tensor, _operands(node)))
    if isinstance(node, ast.Call) and is_of_numbers(node):
        return False
    return not isinstance(node, ast.Constant) and not is_number_of_module(node)
