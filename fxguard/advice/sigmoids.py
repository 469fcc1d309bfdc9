"""A sigmoid that is written with an exponential which overflows: ``e = exp(x); e / (1 + e)``.

For code of which no graph is known, such as an own backward. Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.findings import Fix
from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node, target_of
from fxguard.source.named import called_name

__all__ = ["fix_of_sigmoid"]


def fix_of_sigmoid(source: Source | None) -> Fix | None:
    """What to take in place of the quotient; None if the function has none.

    Args:
        source: the line that assigns the exponential to a variable.
    """
    if source is None:
        return None
    name, statement = target_of(source), statement_node(source)
    if not name or not isinstance(statement, ast.Assign):
        return None
    exp = statement.value
    if not (isinstance(exp, ast.Call) and called_name(exp) == "exp"):
        return None
    if exp.args:
        argument = ast.unparse(exp.args[0])
    else:
        argument = ast.unparse(exp.func.value) if isinstance(exp.func, ast.Attribute) else "x"
    quotients = (
        node
        for node in ast.walk(function_around(source))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    )
    sigmoid, whole = f"torch.sigmoid({argument})", f"{name} / (1 + {name})"
    for each in quotients:
        if name not in map(ast.unparse, _factors(each.left)):
            continue
        if _is_one_plus(each.right, name):
            return Fix("exact", f"take {sigmoid} in place of {whole}, which is inf / inf there")
        if any(_is_one_plus(factor, name) for factor in _factors(each.right)):
            text = f"with s = {sigmoid}, {whole} is s and 1 / (1 + {name}) is 1 - s: write the "
            return Fix("exact", f"{text}quotient with s, so that no exp is left: it is inf / inf")
    return None


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _factors(node.left)
    return [node]


def _is_one_plus(node: ast.expr, name: str) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    is_one = any(isinstance(x, ast.Constant) and x.value == 1 for x in sides)
    return is_one and any(isinstance(x, ast.Name) and x.id == name for x in sides)
