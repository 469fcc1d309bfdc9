"""Elementwise expressions of a program, of one number: ``torch.sqrt(1 - x * x)`` at 0.6.

Computed in Python; nothing of the program runs. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping

__all__ = ["FUNCTIONS", "MODULES", "NO_NUMBER", "OPERATORS", "number_in", "variables_of"]

MODULES = frozenset(["F", "math", "torch"])
LIBRARIES = MODULES | {"torch.nn.functional", "torch.special"}

# What is raised of an expression that is none of these, or has no value there.
NO_NUMBER = (ArithmeticError, TypeError, ValueError, KeyError, IndexError)

FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    **{
        name: getattr(math, name)
        for name in (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp"),
            *("expm1", "log", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh"),
        )
    },
    "abs": abs,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: max(x, 0.0),
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "softplus": lambda x: math.log1p(math.exp(x)),
    "square": lambda x: x * x,
}
_KEPT = frozenset(["clone", "contiguous", "detach", "float", "double"])
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda x, y: x + y,
    ast.Div: lambda x, y: x / y,
    ast.Mult: lambda x, y: x * y,
    ast.Pow: lambda x, y: float(x**y),
    ast.Sub: lambda x, y: x - y,
}
_COMPARES: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: lambda x, y: x == y,
    ast.Gt: lambda x, y: x > y,
    ast.GtE: lambda x, y: x >= y,
    ast.Lt: lambda x, y: x < y,
    ast.LtE: lambda x, y: x <= y,
    ast.NotEq: lambda x, y: x != y,
}


def number_in(node: ast.AST, variable: Callable[[str], float]) -> float:
    """The number that an expression gives.

    Args:
        node: the expression.
        variable: gives the number of a variable, ``rho``, ``self.rho`` or ``rho[0]``.

    Raises:
        ArithmeticError, TypeError, ValueError, KeyError, IndexError: see :data:`NO_NUMBER`.

    Example:
        >>> number_in(ast.parse("1 - x * x", mode="eval").body, lambda name: 0.6)
        0.64
    """

    def of(inner: ast.AST) -> float:
        return number_in(inner, variable)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        text = ast.unparse(node)
        return math.pi if text == "math.pi" else variable(text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -of(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](of(node.left), of(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return float(_COMPARES[type(node.ops[0])](of(node.left), of(node.comparators[0])))
    if not isinstance(node, ast.Call):
        raise TypeError(ast.unparse(node))
    called, args = getattr(node.func, "attr", "") or ast.unparse(node.func), _operands(node)
    if called == "where" and len(args) == 3:
        return of(args[1] if of(args[0]) else args[2])
    if called == "pow" and len(args) == 2:
        return float(of(args[0]) ** of(args[1]))
    return of(args[0]) if called in _KEPT else FUNCTIONS[called](of(args[0]))


def variables_of(node: ast.AST) -> set[str]:
    """The variables that an expression reads: ``self.rho`` is one.

    Example:
        >>> variables_of(ast.parse("torch.sqrt(1 - self.rho ** 2)", mode="eval").body)
        {'self.rho'}
    """
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return {ast.unparse(node)}
    inner = _operands(node) if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    return set[str]().union(*map(variables_of, inner))


def _operands(call: ast.Call) -> list[ast.expr]:
    """What a function is called with, or a method and what it is called on."""
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in LIBRARIES:
        return [call.func.value, *call.args]
    return list(call.args)
