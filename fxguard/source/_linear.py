"""The linear recursion that a loop runs, as a filter does: ``y[t] = x[t] + p y[t-1] + q y[t-2]``.

It is read off the program's text: each turn makes new states of the old ones, by a matrix. Its
trace and its determinant tell p and q, in whichever form a filter is written, if its states are
variables: those of a list are not followed. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from fxguard.source._recurrences import names_in

__all__ = ["recursion_of"]

MOST_STATES = 2
LONGEST = 40  # characters of a coefficient

# What is added up of states, each with its coefficients; those of no state are left out.
Form = dict[str, list[str]]


class _NotLinearError(Exception):
    """A turn does something else than to add multiples of the states."""


def recursion_of(assigned: Iterable[tuple[str, ast.expr, ast.stmt]], name: str) -> list[str]:
    r"""``["p"]`` or ``["p", "q"]``, as text; [] of a loop that is not linear, or of higher order.

    Args:
        assigned: the variables that a turn assigns, in order, with their values and statements.
        name: a variable that a turn computes from itself.

    Example:
        >>> loop = ast.parse("y = b * x[t] + s\ns = c * x[t] - a * y")
        >>> recursion_of([(x.targets[0].id, x.value, x) for x in loop.body], "s")
        ['-a']
    """
    steps = list(assigned)
    states = _states(steps, name)
    if not 0 < len(states) <= MOST_STATES:
        return []
    try:
        forms = _after_a_turn(steps, states)
    except _NotLinearError:
        return []
    rows = [[forms[to].get(of, []) for of in states] for to in states]
    if len(states) == 1:
        found = [_sum(rows[0][0])]
    else:
        (a, b), (c, d) = rows
        # Cayley and Hamilton: x[t] = trace * x[t-1] - det * x[t-2].
        found = [_sum([*a, *d]), _sum([*_product(b, c), *map(_less, _product(a, d))])]
    return found if all(0 < len(each) <= LONGEST for each in found) else []


def _states(steps: Sequence[tuple[str, ast.expr, ast.stmt]], name: str) -> list[str]:
    """The variables that a turn reads before it assigns them, and that this one is made of."""
    carried, known = list[str](), set[str]()
    reads: dict[str, set[str]] = {}
    for to, value, at in steps:
        same = {each for each, _, other in steps if other is at}
        for each in names_in(value):
            if each not in known - same and each not in carried:
                carried.append(each)
        known.add(to)
        reads.setdefault(to, set()).update(names_in(value))
    behind, todo = set[str](), [name]
    while todo:
        for each in reads.get(todo.pop(), ()):
            if each not in behind:
                behind.add(each)
                todo.append(each)
    return [each for each in carried if each in behind and each in reads]


def _after_a_turn(
    steps: Sequence[tuple[str, ast.expr, ast.stmt]], states: Sequence[str]
) -> dict[str, Form]:
    """What the variables are made of after a turn, in terms of the states before it."""
    forms: dict[str, Form] = {each: {each: ["1"]} for each in states}
    at = 0
    while at < len(steps):
        same = [step for step in steps[at:] if step[2] is steps[at][2]]
        made = {to: _form(value, forms) for to, value, _ in same}
        forms |= made
        at += len(same)
    return forms


def _form(node: ast.expr, forms: Mapping[str, Form]) -> Form:
    if not any(forms.get(each) for each in names_in(node)):
        return {}  # of inputs and parameters alone
    if isinstance(node, ast.Name):
        return forms[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _scaled(_form(node.operand, forms), "-1")
    if not isinstance(node, ast.BinOp):
        raise _NotLinearError
    left, right = _form(node.left, forms), _form(node.right, forms)
    if isinstance(node.op, ast.Add):
        return _added(left, right)
    if isinstance(node.op, ast.Sub):
        return _added(left, _scaled(right, "-1"))
    if isinstance(node.op, ast.Mult) and not (left and right):
        return _scaled(left or right, ast.unparse(node.right if left else node.left))
    raise _NotLinearError


def _added(one: Form, other: Form) -> Form:
    return {each: [*one.get(each, []), *other.get(each, [])] for each in {**one, **other}}


def _scaled(form: Form, by: str) -> Form:
    return {each: _product(terms, [by]) for each, terms in form.items()}


def _product(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return [_times(a, b) for a in one for b in other]


def _times(one: str, other: str) -> str:
    is_negative = one.startswith("-") != other.startswith("-")
    factors = [each for each in (_bare(one), _bare(other)) if each != "1"]
    text = " * ".join(factors) or "1"
    return f"-{text}" if is_negative else text


def _bare(term: str) -> str:
    text = term.removeprefix("-")
    tree = ast.parse(text, mode="eval").body
    is_sum = isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.Add, ast.Sub))
    return f"({text})" if is_sum else text


def _less(term: str) -> str:
    return _times(term, "-1")


def _sum(terms: Sequence[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ") or "0"
