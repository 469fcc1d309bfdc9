"""The variable that masks something in a statement: ``pad`` of ``x.masked_fill(pad, -inf)``.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["masks_in"]

KEYWORDS = ("attn_mask", "key_padding_mask", "mask", "src_key_padding_mask", "src_mask")
FILLS = ("masked_fill", "masked_fill_")
MOVES = ("bool", "expand", "logical_not", "squeeze", "to", "unsqueeze", "view")


def masks_in(statement: ast.stmt) -> list[str]:
    """The variables that a statement masks something with, each once.

    Example:
        >>> masks_in(ast.parse("w = x.masked_fill(~pad[:, None], -torch.inf)").body[0])
        ['pad']
    """
    return list(dict.fromkeys(filter(None, map(_variable, _masks(statement)))))


def _masks(statement: ast.stmt) -> Iterator[ast.expr]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            yield from (each.value for each in node.keywords if each.arg in KEYWORDS)
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_function = isinstance(getattr(node.func, "value", None), ast.Name) and (
                node.func.value.id == "torch"  # type: ignore[attr-defined]
            )
            if name in FILLS:
                yield from node.args[1:2] if is_function else node.args[:1]
            elif name == "where":
                yield from node.args[:1]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    yield from (each.slice for each in targets if isinstance(each, ast.Subscript))


def _variable(node: ast.expr) -> str:
    """The variable behind what only negates, compares with a number, or moves it."""
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            node = node.left
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MOVES:
            node = node.func.value  # type: ignore[attr-defined]
        else:
            return ""
