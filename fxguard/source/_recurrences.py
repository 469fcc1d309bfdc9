"""What an expression does with a variable that it computes anew: steps, factors, quotients.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

__all__ = [
    "factor_in",
    "is_bounded_in",
    "is_called_with",
    "is_of_squares",
    "is_turned",
    "names_in",
    "quotient_in",
    "step_in",
]

TRANSPOSED = frozenset(["H", "T", "mH", "mT"])
MODULES = frozenset(["F", "functional", "torch"])
LONGEST = 20  # characters of an expression that is told
# Methods that keep, or make smaller, the norm of what they are called on.
LINEAR = frozenset(
    [
        *("bfloat16", "clone", "contiguous", "detach", "double", "expand", "flatten", "float"),
        *("half", "permute", "relu", "reshape", "sigmoid", "squeeze", "t", "tanh", "to"),
        *("transpose", "unsqueeze", "view"),
    ]
)
OF_NORMS = frozenset(["abs", "norm", "sqrt", "std", "sum", "vector_norm"])
BOUNDS = frozenset(["clamp", "clip", "maximum", "minimum"])
TURNS = LINEAR - {"relu", "sigmoid", "tanh"}  # these hand on what they are called on
PRODUCTS = frozenset(["bmm", "matmul", "mm", "mul", "multiply", "mv"])

_TIMES = (ast.Mult, ast.MatMult)


def step_in(value: ast.expr, made_of_it: set[str]) -> str:
    """``dt`` of ``u + dt * rate``."""
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            for own, change in ((node.left, node.right), (node.right, node.left)):
                scale = _scale_of(change, made_of_it)
                if scale and _is_itself(own, made_of_it):
                    return scale
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            alpha = next((x.value for x in node.keywords if x.arg == "alpha"), None)
            if alpha is not None and _is_itself(node.func.value, made_of_it):
                return _short(alpha)
    return ""


def _is_itself(node: ast.expr, made_of_it: set[str]) -> bool:
    """The variable, or a part of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and node.id in made_of_it


def _scale_of(change: ast.expr, made_of_it: set[str]) -> str:
    if not isinstance(change, ast.BinOp) or not isinstance(change.op, (ast.Mult, ast.Div)):
        return ""
    for scale, rest in ((change.left, change.right), (change.right, change.left)):
        is_free = made_of_it.isdisjoint(names_in(scale))
        if is_free and not made_of_it.isdisjoint(names_in(rest)):
            return _short(scale)
    return ""


def factor_in(value: ast.expr, made_of_it: set[str]) -> tuple[str, bool]:
    """``w`` of ``g @ w.t()``, and whether it is a matrix.

    "" where something is multiplied with what depends on it as well.
    """
    found, is_found_matrix = "", False
    for one, other, is_matrix in _products_in(value):
        depends = [not made_of_it.isdisjoint(names_in(x)) for x in (one, other)]
        if all(depends):
            return "", False
        own = one if depends[0] else other
        if any(depends) and not found and _is_linear(own):
            found, is_found_matrix = _short(_untransposed(other if depends[0] else one)), is_matrix
    return found, is_found_matrix


def _is_linear(node: ast.expr) -> bool:
    """Whether an expression is no larger than what it is made of, up to a factor."""
    if isinstance(node, ast.Name):
        return True
    if isinstance(node, ast.Subscript):
        return _is_linear(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr in TRANSPOSED and _is_linear(node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in LINEAR and _is_linear(_called_on(node))


def quotient_in(
    name: str,
    value: ast.expr,
    values: Mapping[str, Sequence[ast.expr]],
    made_of_it: set[str],
) -> tuple[str, str]:
    """``f / df`` of ``x - f / df``, where both are computed from ``x``, and ``df``.

    "" where the divisor is a norm, or made of what it divides: then the quotient is no step.

    Args:
        name: of the variable.
        value: what it is computed as.
        values: what the loop computes each variable as.
        made_of_it: the variable, and those that are computed from it.
    """
    while _is_call_of_method(value) and value.func.attr in BOUNDS:
        value = _called_on(value)
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Sub):
        return "", ""
    if not (isinstance(value.left, ast.Name) and value.left.id == name):
        return "", ""
    step = value.right
    if isinstance(step, ast.Name):
        step = values.get(step.id, [step])[0]
    if not isinstance(step, ast.BinOp) or not isinstance(step.op, ast.Div):
        return "", ""
    above, below = step.left, step.right
    if any(made_of_it.isdisjoint(names_in(x)) for x in (above, below)):
        return "", ""
    called = {x.func.attr for x in ast.walk(below) if _is_call_of_method(x)}
    is_norm = not OF_NORMS.isdisjoint(called) or any(map(_is_root, ast.walk(below)))
    is_norm = is_norm or ("mean" in called and "**" in ast.unparse(below))
    is_scaled = ast.unparse(above) in ast.unparse(below)
    return ("", "") if is_norm or is_scaled else (ast.unparse(step), ast.unparse(below))


def _is_root(node: ast.AST) -> bool:
    """Whether this is a power other than a whole one: ``v ** 0.5``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow):
        return False
    power = node.right
    return not (isinstance(power, ast.Constant) and isinstance(power.value, int))


def is_of_squares(values: Sequence[ast.expr], made_of_it: set[str]) -> bool:
    """Whether two matrices that depend on the variable are multiplied, as in ``x @ x.t()``.

    And nothing is computed of them but products and sums.
    """
    calls = {_name_of(x) for value in values for x in ast.walk(value) if isinstance(x, ast.Call)}
    if not calls <= PRODUCTS | TURNS:
        return False
    return any(
        is_matrix and not any(made_of_it.isdisjoint(names_in(each)) for each in (one, other))
        for value in values
        for one, other, is_matrix in _products_in(value)
    )


def is_bounded_in(statement: ast.stmt, name: str) -> bool:
    """Whether a statement bounds a variable: ``x = x.clamp(0, 1)``, or ``x.clamp_(0, 1)``."""
    return any(_bounds(each, name) for each in ast.walk(statement))


def _bounds(node: ast.AST, name: str) -> bool:
    value = node.value if isinstance(node, (ast.Assign, ast.Expr)) else None
    if not isinstance(value, ast.Call) or not _is_call_of_method(value):
        return False
    if isinstance(node, ast.Assign):
        targets = [ast.unparse(each) for each in node.targets]
    else:
        targets = [ast.unparse(_called_on(value))] if _name_of(value).endswith("_") else []
    return _name_of(value).removesuffix("_") in BOUNDS and name in targets


def _name_of(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def is_turned(node: ast.expr) -> bool:
    """Whether an expression only turns or converts a variable, as ``g.t() if wide else g``."""
    if isinstance(node, ast.IfExp):
        return is_turned(node.body) and is_turned(node.orelse)
    if isinstance(node, ast.Attribute):
        return node.attr in TRANSPOSED and is_turned(node.value)
    if _is_call_of_method(node):
        return node.func.attr in TURNS and is_turned(_called_on(node))
    return isinstance(node, ast.Name)


def _called_on(node: ast.Call) -> ast.expr:
    """What a method is called on, or what a function of torch reads first."""
    assert isinstance(node.func, ast.Attribute)
    owner = node.func.value
    is_function = isinstance(owner, ast.Name) and owner.id in MODULES and bool(node.args)
    return node.args[0] if is_function else owner


def is_called_with(node: ast.AST, made_of_it: set[str]) -> bool:
    """Whether this calls a function by its name with the variable, ``features(z)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return any(not made_of_it.isdisjoint(names_in(each)) for each in node.args)


def names_in(node: ast.AST) -> list[str]:
    """The variables that an expression reads, in order."""
    return [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]


def _is_call_of_method(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _products_in(value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """The factors of products, the outermost first, and whether they are matrices."""
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, _TIMES):
            yield node.left, node.right, isinstance(node.op, ast.MatMult)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            factors = node.args if len(node.args) > 1 else [node.func.value, *node.args]
            if node.func.attr in PRODUCTS and len(factors) == 2:
                yield factors[0], factors[1], not node.func.attr.startswith("mul")


def _untransposed(node: ast.expr) -> ast.expr:
    called = node.func if isinstance(node, ast.Call) and not node.args else node
    is_transposed = isinstance(called, ast.Attribute) and called.attr in ("t", "T", "mT", "H")
    return called.value if is_transposed and isinstance(called, ast.Attribute) else node


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= LONGEST else ""
