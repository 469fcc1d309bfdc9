"""Variables that a loop computes from themselves at each turn, by the program's text.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source._linear import recursion_of
from fxguard.source._recurrences import (
    factor_in,
    is_bounded_in,
    is_called_with,
    is_of_squares,
    is_turned,
    names_in,
    quotient_in,
    step_in,
)
from fxguard.source.assigned import function_around, holds, source_of

__all__ = ["Iterated", "iterated_at", "loops_around"]

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Iterated:
    """A variable that a loop computes from itself.

    Attributes:
        name: of the variable.
        source: the statement that assigns it in the loop.
        begins: the last statement that gave it a value before the loop; None if that is not known.
        step: what scales the change that is added to it, ``dt``; "" if nothing does.
        factor: what it is multiplied with, ``w``, if that does not depend on it; "" otherwise.
        is_matrix: whether that is a product of matrices.
        recursion: p and q of the linear recursion x[t] = p x[t-1] + q x[t-2] that the loop runs,
            or p alone; () if it is none.
        quotient: what a quotient is subtracted from it for, ``f(x) / df(x)``, as Newton's method
            does; "" if none is.
        divisor: what that quotient divides by; "" without one.
        is_bounded: whether the loop bounds it, as by ``clamp``.
        is_called: whether a function of the script makes it of itself, which may be anything.
        is_of_squares: whether the loop multiplies it with its transpose, as Newton and Schulz do.
        value: the expression that computes it.
        values: the same, and those of variables that it reads and that each turn computes anew.
        value_source: the statement of that expression, which may have another name for it.
        made_of_it: the variable, and those that the loop computes from it.
        inside: lines of the loop.
        outside: lines of the function around it, that are not in it.
        apart: those of them that are in no loop around it: where they run, it begins anew.
    """

    name: str
    source: Source
    begins: Source | None
    step: str
    factor: str
    is_matrix: bool
    recursion: tuple[str, ...]
    quotient: str
    divisor: str
    is_bounded: bool
    is_called: bool
    is_of_squares: bool
    value: ast.expr
    values: tuple[ast.expr, ...]
    value_source: Source
    made_of_it: frozenset[str]
    inside: frozenset[int]
    outside: frozenset[int]
    apart: frozenset[int]


def iterated_at(source: Source) -> Iterated | None:
    """The variable that a line assigns or reads, and that is iterated in the loop around it.

    Example:
        >>> iterated_at(Source("heat.py", 12, "u = u + dt * lap(u)")).step
        "dt"
    """
    scope = function_around(source)
    loops = loops_around(scope, source.line)
    if not loops:
        return None
    loop = loops[-1]
    assigned = [pair for each in _statements(loop.body) for pair in _assignments(each)]
    reads: dict[str, set[str]] = {}
    for name, value, _ in assigned:
        reads.setdefault(name, set()).update(names_in(value))
    here = [(name, value) for name, value, each in assigned if holds(each, source.line)]
    if not here:
        return None
    carried = _carried(assigned)
    own = [x for x in _reached_from(*here[0], reads) if x in _behind([x], reads) & carried]
    if not own:
        return None
    values: dict[str, list[ast.expr]] = {}
    for name, value, _ in assigned:
        values.setdefault(name, []).append(value)
    quotients = {name: _quotient_of(name, values, reads) for name in own}
    own.sort(key=lambda each: _age(each, values))  # what was computed last comes first
    name = next((each for each in own if quotients[each][0]), own[0])
    made_of_it = _made_of(name, reads)
    quotient, divisor, lowers = quotients[name]
    value = lowers or _main_of(name, values, made_of_it)
    statement = next(each for other, found, each in assigned if found is value and other == name)
    computed, computed_at = value, statement
    for _ in values:  # y2, y1 = y1, y
        if isinstance(computed, ast.Name) and computed.id in values:
            computed = values[computed.id][-1]
            computed_at = next(each for _, found, each in assigned if found is computed)
    anew = values.keys() - carried
    behind = [x for each in names_in(computed) if each in anew for x in values[each]]
    of_it = [found for other, found, _ in assigned if other in made_of_it]
    inside, within = _span(loop), _span(loops[0])
    lines = _lines(_statements(getattr(scope, "body", [])))
    return Iterated(
        name,
        source_of(statement, source.file),
        _last_value(scope, name, loop.lineno, source.file),
        next((step for x in (computed, *behind) if (step := step_in(x, made_of_it))), ""),
        *factor_in(computed, made_of_it),
        tuple(recursion_of(assigned, name)),
        quotient,
        divisor,
        any(is_bounded_in(each, name) for each in loop.body),
        any(is_called_with(node, made_of_it) for node in ast.walk(computed)),
        is_of_squares(of_it, made_of_it),
        computed,
        (computed, *behind),
        source_of(computed_at, source.file),
        frozenset(made_of_it),
        inside,
        lines - inside,
        lines - within,
    )


def _age(name: str, values: Mapping[str, Sequence[ast.expr]]) -> int:
    """How many turns ago a variable was computed that others have handed on: 2 of ``y2 = y1``."""
    age = 0
    while age <= len(values) and isinstance(value := values[name][-1], ast.Name):
        if (name := value.id) not in values:
            break
        age += 1
    return age


def _quotient_of(
    name: str, values: Mapping[str, Sequence[ast.expr]], reads: Mapping[str, set[str]]
) -> tuple[str, str, ast.expr | None]:
    """The quotient that a variable is lowered by, its divisor, and what lowers it; "" without."""
    made_of_it = _made_of(name, reads)
    for value in values[name]:
        found = quotient_in(name, value, values, made_of_it)
        if found[0]:
            return (*found, value)
    return "", "", None


def _main_of(name: str, values: Mapping[str, Sequence[ast.expr]], made_of_it: set[str]) -> ast.expr:
    """What computes a variable: a step of it, or else what assigns it last."""
    steps = (each for each in values[name] if step_in(each, made_of_it))
    return next(steps, values[name][-1])


def _carried(assigned: Sequence[tuple[str, ast.expr, ast.stmt]]) -> set[str]:
    """The variables that a loop reads before it assigns them."""
    carried, known = set[str](), set[str]()
    for name, value, _ in assigned:
        carried.update(each for each in names_in(value) if each not in known)
        known.add(name)
    return carried


def _made_of(name: str, reads: Mapping[str, set[str]]) -> set[str]:
    """A variable, and those that the loop computes from it."""
    return {x for x in reads if name in _behind([x], reads)} | {name}


def _span(loop: ast.stmt) -> frozenset[int]:
    return frozenset(range(loop.lineno, (loop.end_lineno or loop.lineno) + 1))


def loops_around(scope: ast.AST, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
    """The loops of a function that a line is in, the innermost one last."""
    found = []
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, _SCOPES) or not holds(node, line):
            continue
        if isinstance(node, _LOOPS) and any(holds(each, line) for each in node.body):
            found.append(node)
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


def _reached_from(name: str, value: ast.expr, reads: Mapping[str, set[str]]) -> list[str]:
    """What a statement assigns, and what it reads, that the loop assigns."""
    return [name, *(x for x in names_in(value) if x in reads)]


def _behind(names: Sequence[str], reads: Mapping[str, set[str]]) -> set[str]:
    """All that these variables are computed from in the loop."""
    todo, found = list(names), set[str]()
    while todo:
        for each in reads.get(todo.pop(), ()):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _lines(statements: Iterable[ast.stmt]) -> frozenset[int]:
    """The lines that statements cover, without those of functions that they define."""
    return frozenset(
        line
        for each in statements
        if not any(isinstance(x, _SCOPES) for x in ast.walk(each))
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    )


def _last_value(scope: ast.AST, name: str, line: int, file: str) -> Source | None:
    """The last statement before a loop that gave a variable its value.

    One that only turns or converts it is passed over, if there is another one.
    """
    found: list[tuple[ast.expr, ast.stmt]] = []
    for each in _statements(getattr(scope, "body", [])):
        if each.lineno < line:
            found += [(value, at) for to, value, at in _assignments(each) if to == name]
    computes = [at for value, at in found if not is_turned(value)] or [at for _, at in found]
    return source_of(computes[-1], file) if computes else None
