"""Squares and magnitudes of integers that wrapped around, and are negative.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.squares import magnitude_at, square_at

__all__ = ["Wrapped", "wrapped_magnitude", "wrapped_square"]

MOST_STEPS = 32  # from the operand back
SMALLEST = (2.0**7, 2.0**15, 2.0**31, 2.0**63)  # magnitudes of the smallest integers of types

_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("add div mean mul sub sum")
_MOVED = frozenset(map(plain, MOVES | SELECTS | CASTS))
_FROM_INTEGERS = frozenset(map(plain, CASTS)) | names_in("div double float half to true_divide")


class Wrapped(NamedTuple):
    """A square of integers."""

    squared: str  # as the program has it, "pcm"
    place: str  # of the line that squares it


def wrapped_square(case: Case) -> Wrapped | None:
    """The square of integers that a negative operand was computed from; None if it was not.

    No floating-point number has led to it, and the program's text squares something there. Such a
    square is negative only where it did not fit the type of its integers.
    """
    if case.negative_operand is None or case.around.culprit is None:
        return None
    todo = [case.around.culprit]
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(todo.pop(0)) if todo else None
        if step is None:
            return None
        name = plain(step.kind)
        if not step.inputs and name in _FROM_INTEGERS and step.source is not None:
            found = square_at(step.source)
            return None if found is None else Wrapped(found[0], found[1].place)
        if step.counts and name not in _PASSED:
            return None
        todo += step.inputs
    return None


def wrapped_magnitude(case: Case) -> Wrapped | None:
    """The ``abs`` of integers that a negative operand is, times positive numbers; None if it isn't.

    The smallest integer of a type has no counterpart: its ``abs`` is that negative integer.
    """
    value = case.around.culprit
    for _ in range(MOST_STEPS if case.negative_operand is not None else 0):
        step = None if value is None else case.around.maker_of(value)
        if step is None:
            return None
        name = plain(step.kind)
        if not step.inputs and name in _FROM_INTEGERS and step.source is not None:
            found = magnitude_at(step.source) if _is_of_smallest(case, step) else None
            return None if found is None else Wrapped(found[0], found[1].place)
        is_kept = not step.counts or name in _MOVED
        if not step.inputs or not (is_kept or _is_positive_factor(step)):
            return None
        value = step.inputs[0]
    return None


def _is_of_smallest(case: Case, step: Step) -> bool:
    """Its largest magnitude is that of the smallest integer of a type, possibly divided."""
    made = case.around.range_of(step.outputs[0]) if step.outputs else None
    divisor = math.prod(step.literals) if plain(step.kind) in ("div", "true_divide") else 1.0
    return made is not None and divisor > 0 and made.abs_max * divisor in SMALLEST


def _is_positive_factor(step: Step) -> bool:
    """It multiplies or divides by a positive number."""
    is_scaling = plain(step.kind) in ("div", "mul") and len(set(step.inputs)) == 1
    return is_scaling and bool(step.literals) and min(step.literals) > 0
