"""What a line gives to a layer, or multiplies with weights: ``x`` of ``self.fc1(x)``, ``x @ w``.

Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import statement_at
from fxguard.source.syntax import tree_of

__all__ = ["argument_read"]


def argument_read(source: Source) -> str:
    """The only variable of a line that a product or a call has as its first operand; else ""."""
    tree = tree_of(statement_at(source))
    found = set[str]()
    for node in () if tree is None else ast.walk(tree):
        first: ast.expr | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            first = node.left
        elif isinstance(node, ast.Call) and len(node.args) == 1:
            first = node.args[0]
        if isinstance(first, (ast.Name, ast.Attribute)):
            found.add(ast.unparse(first))
    return found.pop() if len(found) == 1 else ""
