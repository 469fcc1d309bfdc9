"""The expression that a statement computes as an operand of one of its operations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fxguard.source.named import SIGNS
from fxguard.source.syntax import tree_of

__all__ = ["operand_in"]

LONGEST = 60  # characters


def operand_in(code: str, what: str) -> str:
    """The operand of an operation, if the statement computes it; "" if that is not certain.

    Args:
        code: the statement, in one line.
        what: ``input[1] of sub``, of an operation whose operands are all tensors.

    Example:
        >>> operand_in("logits = logits - eye * self.big", "input[1] of sub")
        'eye * self.big'
    """
    found = re.fullmatch(r"input\[(\d)\] of (\w+)", what)
    if found is None or found[2] not in SIGNS:
        return ""
    tree = tree_of(code)
    if tree is None:  # a part of a statement
        return ""
    pairs = list(_operands(tree, SIGNS[found[2]]))
    index = int(found[1])
    if len(pairs) != 1 or index > 1 or any(isinstance(x, ast.Constant) for x in pairs[0]):
        return ""
    operand = pairs[0][index]
    if not any(isinstance(node, (ast.BinOp, ast.Call)) for node in ast.walk(operand)):
        return ""  # a name: another statement has computed it
    text = ast.unparse(operand)
    return text if len(text) <= LONGEST else ""


def _operands(tree: ast.AST, sign: type[ast.operator]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, sign):
            yield node.left, node.right
