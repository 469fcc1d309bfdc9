"""Variables that a loop computes from themselves at each turn, by the program's text.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds, source_of

__all__ = ["Iterated", "iterated_at"]

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
TRANSPOSED = frozenset(["H", "T", "mH", "mT"])
OF_NORMS = frozenset(["abs", "norm", "sqrt", "std", "sum", "vector_norm"])
PRODUCTS = frozenset(["bmm", "matmul", "mm", "mul", "multiply", "mv"])

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_TIMES = (ast.Mult, ast.MatMult)


@dataclass(frozen=True, slots=True)
class Iterated:
    """A variable that a loop computes from itself.

    Attributes:
        name: of the variable.
        source: the statement that assigns it in the loop.
        begins: the statement that gave it its first value; None if that is not known.
        step: what scales the change that is added to it, ``dt``; "" if nothing does.
        factor: what it is multiplied with, ``w``, if that does not depend on it; "" otherwise.
        is_matrix: whether that is a product of matrices.
        quotient: what a quotient is subtracted from it for, ``f(x) / df(x)``, as Newton's method
            does; "" if none is.
        is_called: whether a function of the script makes it of itself, which may be anything.
    """

    name: str
    source: Source
    begins: Source | None
    step: str
    factor: str
    is_matrix: bool
    quotient: str
    is_called: bool


def iterated_at(source: Source) -> Iterated | None:
    """The variable that a line assigns or reads, and that is iterated in the loop around it.

    Example:
        >>> iterated_at(Source("heat.py", 12, "u = u + dt * lap(u)")).step
        "dt"
    """
    scope = function_around(source)
    loop = _innermost_loop(scope, source.line)
    if loop is None:
        return None
    assigned = [pair for each in _statements(loop.body) for pair in _assignments(each)]
    reads: dict[str, set[str]] = {}
    for name, value, _ in assigned:
        reads.setdefault(name, set()).update(_names_in(value))
    here = [(name, value) for name, value, each in assigned if holds(each, source.line)]
    if not here:
        return None
    own = [x for x in _reached_from(*here[0], reads) if x in _behind([x], reads)]
    if not own:
        return None
    values = {name: value for name, value, _ in assigned}
    quotients = {name: _quotient_in(name, values, _made_of(name, reads)) for name in own}
    name = next(filter(quotients.get, own), own[0])
    made_of_it, value = _made_of(name, reads), values[name]
    statement = next(each for other, _, each in reversed(assigned) if other == name)
    return Iterated(
        name,
        source_of(statement, source.file),
        _first_value(scope, name, loop.lineno, source.file),
        _step_in(value, made_of_it),
        *_factor_in(value, made_of_it),
        quotients[name],
        any(_is_called_with(node, made_of_it) for node in ast.walk(value)),
    )


def _made_of(name: str, reads: Mapping[str, set[str]]) -> set[str]:
    """A variable, and those that the loop computes from it."""
    return {x for x in reads if name in _behind([x], reads)} | {name}


def _innermost_loop(scope: ast.AST, line: int) -> ast.For | ast.AsyncFor | ast.While | None:
    found = None
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, _SCOPES) or not holds(node, line):
            continue
        if isinstance(node, _LOOPS) and any(holds(each, line) for each in node.body):
            found = node
        todo += ast.iter_child_nodes(node)
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for each in body:
        if isinstance(each, _SCOPES):
            continue
        yield each
        for block in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(each, block, []))


def _assignments(statement: ast.stmt) -> list[tuple[str, ast.expr, ast.stmt]]:
    """The variables that a statement assigns, each with what it is computed from."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = ast.Name(statement.target.id, ast.Load())
        value: ast.expr = ast.BinOp(name, statement.op, statement.value)
        return [(statement.target.id, value, statement)]
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    pairs: list[tuple[str, ast.expr, ast.stmt]] = []
    for target in targets:
        values = statement.value
        if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple):
            both = zip(target.elts, values.elts, strict=False)
            pairs += [(x.id, v, statement) for x, v in both if isinstance(x, ast.Name)]
        elif isinstance(target, ast.Tuple):
            names = [x.id for x in target.elts if isinstance(x, ast.Name)]
            pairs += [(name, values, statement) for name in names]
        elif isinstance(target, ast.Name):
            pairs.append((target.id, values, statement))
    return pairs


def _names_in(node: ast.AST) -> list[str]:
    """The variables that an expression reads, in order."""
    return [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]


def _reached_from(name: str, value: ast.expr, reads: Mapping[str, set[str]]) -> list[str]:
    """What a statement assigns, and what it reads, that the loop assigns."""
    return [name, *(x for x in _names_in(value) if x in reads)]


def _behind(names: Sequence[str], reads: Mapping[str, set[str]]) -> set[str]:
    """All that these variables are computed from in the loop."""
    todo, found = list(names), set[str]()
    while todo:
        for each in reads.get(todo.pop(), ()):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _first_value(scope: ast.AST, name: str, line: int, file: str) -> Source | None:
    """The first statement before a loop that gave a variable its value without reading it."""
    body = getattr(scope, "body", [])
    for each in _statements(body):
        if each.lineno >= line:
            return None
        for assigned, value, statement in _assignments(each):
            if assigned == name and name not in _names_in(value):
                return source_of(statement, file)
    return None


def _step_in(value: ast.expr, made_of_it: set[str]) -> str:
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
        is_free = made_of_it.isdisjoint(_names_in(scale))
        if is_free and not made_of_it.isdisjoint(_names_in(rest)):
            return _short(scale)
    return ""


def _factor_in(value: ast.expr, made_of_it: set[str]) -> tuple[str, bool]:
    """``w`` of ``g @ w.t()``, and whether it is a matrix.

    "" where something is multiplied with what depends on it as well.
    """
    found, is_found_matrix = "", False
    for one, other, is_matrix in _products_in(value):
        depends = [not made_of_it.isdisjoint(_names_in(x)) for x in (one, other)]
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
    owner = node.func.value
    is_function = isinstance(owner, ast.Name) and owner.id in MODULES and bool(node.args)
    return node.func.attr in LINEAR and _is_linear(node.args[0] if is_function else owner)


def _quotient_in(name: str, values: Mapping[str, ast.expr], made_of_it: set[str]) -> str:
    """``f / df`` of ``x - f / df``, where both are computed from ``x``.

    "" where the divisor is a norm, or made of what it divides: then the quotient is no step.
    """
    value = values[name]
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Sub):
        return ""
    if not (isinstance(value.left, ast.Name) and value.left.id == name):
        return ""
    step = value.right
    if isinstance(step, ast.Name):
        step = values.get(step.id, step)
    if not isinstance(step, ast.BinOp) or not isinstance(step.op, ast.Div):
        return ""
    if any(made_of_it.isdisjoint(_names_in(x)) for x in (step.left, step.right)):
        return ""
    above, below = step.left, step.right
    called = {x.func.attr for x in ast.walk(below) if _is_call_of_method(x)}
    is_norm = not OF_NORMS.isdisjoint(called) or "**" in ast.unparse(below)
    is_scaled = ast.unparse(above) in ast.unparse(below)
    return "" if is_norm or is_scaled else ast.unparse(step)


def _is_called_with(node: ast.AST, made_of_it: set[str]) -> bool:
    """Whether this calls a function by its name with the variable, ``features(z)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return any(not made_of_it.isdisjoint(_names_in(each)) for each in node.args)


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
