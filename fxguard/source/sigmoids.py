"""A sigmoid that is written with an exponential which overflows: ``e = exp(x); e / (1 + e)``."""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node, target_of
from fxguard.source.named import called_name

__all__ = ["sigmoid_of"]


def sigmoid_of(source: Source) -> tuple[str, str] | None:
    """The quotient, and the argument of its exponential; None if the function has none.

    Args:
        source: the line that assigns the exponential to a variable.
    """
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
    for node in ast.walk(function_around(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            read = {each.id for each in ast.walk(node.left) if isinstance(each, ast.Name)}
            if name in read and _is_one_plus(node.right, name):
                return f"{name} / (1 + {name})", argument
    return None


def _is_one_plus(node: ast.expr, name: str) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    is_one = any(isinstance(x, ast.Constant) and x.value == 1 for x in sides)
    return is_one and any(isinstance(x, ast.Name) and x.id == name for x in sides)
