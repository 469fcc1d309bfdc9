"""The differences that a line computes: ``1 - x`` and ``x - 4``, by its text.

Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import statement_node

__all__ = ["differences_at", "from_one_at"]


def differences_at(source: Source | None) -> list[ast.BinOp]:
    """The differences of the statement at a line, each once.

    Example:
        ``y = (x - 4) * (1 - x) / (x - 4)`` has ``x - 4`` and ``1 - x``.
    """
    node = None if source is None else statement_node(source)
    found = () if node is None else ast.walk(node)
    less = (x for x in found if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub))
    return list({ast.unparse(each): each for each in less}.values())


def from_one_at(source: Source | None) -> list[ast.BinOp]:
    """Those of them that are ``1 - x``."""
    found = differences_at(source)
    return [x for x in found if isinstance(x.left, ast.Constant) and x.left.value == 1]
