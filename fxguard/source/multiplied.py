"""Whether a program multiplies what a divisor was computed from by the quotient: clipping.

``factor = c / norm(g)`` and, further down, ``g * factor``; by the program's text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, function_around, statement_node, target_of
from fxguard.source.named import called_name, first_argument, variables_in

__all__ = ["is_multiplied_at"]

MOST_STEPS = 3  # from a divisor to the variables that it was computed from

_PRODUCTS = ("mul", "multiply")
_LOOPS = (ast.For, ast.comprehension)


def is_multiplied_at(source: Source) -> bool:
    """Whether a line divides by what it reads, or a later one multiplies that by the quotient.

    Args:
        source: the line of the division.
    """
    statement, target = statement_node(source), target_of(source)
    if statement is None:
        return False
    divisors = [
        each.right
        for each in ast.walk(statement)
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div)
    ]
    around = function_around(source)
    for divisor in divisors:
        names = _with_loops(around, _read(ast.unparse(divisor), source))
        for one, other in _factors(statement):
            holds_it = any(each is divisor for each in ast.walk(one))
            if holds_it and not names.isdisjoint(variables_in(ast.unparse(other))):
                return True
        later = _factors(around) if target else ()
        for one, other in later:
            is_it = target in _of(one) and getattr(one, "lineno", 0) > source.line
            if is_it and not names.isdisjoint(variables_in(ast.unparse(other))):
                return True
    return False


def _read(text: str, source: Source) -> set[str]:
    """The variables that an expression reads, and those that they were computed from."""
    found, todo = set[str](), [(text, source)]
    for _ in range(MOST_STEPS):
        later = []
        for code, at in todo:
            for name in variables_in(code) - found:
                found.add(name)
                made = assignment_of(name, at)
                statement = None if made is None else statement_node(made)
                value = getattr(statement, "value", None)
                if made is not None and made.position != at.position and value is not None:
                    later.append((ast.unparse(value), made))
        todo = later
    return found


def _with_loops(around: ast.AST, names: set[str]) -> set[str]:
    """The same with the variables of loops over them: ``g`` of ``for _, g in grads.items()``."""
    found = set(names)
    for each in ast.walk(around):
        if isinstance(each, _LOOPS) and not names.isdisjoint(variables_in(ast.unparse(each.iter))):
            found |= variables_in(ast.unparse(each.target))
    return found


def _factors(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both factors of each product, in both orders."""
    for each in ast.walk(node):
        pair: tuple[ast.expr, ast.expr] | None = None
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
            pair = each.left, each.right
        elif isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Mult):
            pair = each.target, each.value
        elif isinstance(each, ast.Call) and called_name(each) in _PRODUCTS and each.args:
            first = first_argument(each)
            pair = None if first is None else (first, each.args[-1])
        if pair is not None:
            yield pair
            yield pair[::-1]


def _of(node: ast.expr) -> set[str]:
    """The variable that a factor is, behind indices and methods: ``f.view(-1, 1)``."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute):
                return set()
            node = node.func.value
        else:
            node = node.value
    return {ast.unparse(node)}
