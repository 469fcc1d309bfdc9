"""Numbers that are what roundings left of larger ones.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fxguard.advice._patterns import is_made_by, made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step

__all__ = [
    "MATRIX_PRODUCTS",
    "Cancelled",
    "cancelled_difference",
    "cancelled_state",
    "covariance_update",
]

MOST_STEPS = 64  # from the operand back
MOST_OF_GAIN = 16  # from a product back
ROUNDINGS = 16  # of the largest number, that may add up
SCALED = 16  # by how much the operand may be larger than what cancelled
LEAST = 10  # the largest number of a difference whose roundings matter

_DIFFERENCES = names_in("add rsub sub")
_GAINS = names_in("cholesky_solve div inverse linalg_inv linalg_pinv linalg_solve pinverse solve")
MATRIX_PRODUCTS = names_in("bmm matmul mm mv")
_OUTER = MATRIX_PRODUCTS | names_in("einsum ger mul outer")
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS))
_COMBINES = _PASSED | _DIFFERENCES | MATRIX_PRODUCTS | names_in("div mul neg")


class Cancelled(NamedTuple):
    """A sum or a product in which large numbers cancelled."""

    step: Step
    largest: float  # the magnitude that cancelled


def cancelled_state(case: Case) -> Cancelled | None:
    """What led to the negative operand, and is in all of its elements no more than roundings.

    The operand itself is none: a bound is right for a last difference.
    """
    number, around = _negative(case), case.around
    last = made_by(around, around.culprit)
    if number is None:
        return None
    for step in _combined(around):
        found = None if step is last else _cancelled(around, step, case.dtype)
        if found is not None and number <= SCALED * _roundings(found.largest, case.dtype):
            return found
    return None


def cancelled_difference(case: Case) -> Cancelled | None:
    """The difference that the negative operand is, and in which every term is far larger.

    Squared distances by a product, ``a2 + b2 - 2 * ab``, are none: a bound repairs them.
    """
    number, around = _negative(case), case.around
    step = made_by(around, around.culprit)
    if number is None or step is None or plain(step.kind) not in ("rsub", "sub"):
        return None
    if _is_distance(around, step):
        return None
    terms = [abs(each) for each in step.literals]
    for value in step.inputs:
        found = around.range_of(value)
        terms += [] if found is None else [found.abs_min]
    least = max(terms, default=0.0)
    is_one = LEAST < least < math.inf and number <= _roundings(least, case.dtype)
    return Cancelled(step, least) if is_one else None


def covariance_update(case: Case) -> Step | None:
    """The ``(I - K H) P``, or ``P - K (P H)^T``, that led to a negative operand.

    It need not stay a covariance.

    Source: Bucy and Joseph, Filtering for Stochastic Processes with Applications to Guidance, 1968.
    """
    around = case.around
    for step in _combined(around) if _negative(case) is not None else ():
        if len(step.inputs) != 2:
            continue
        if plain(step.kind) in MATRIX_PRODUCTS:
            rest = made_by(around, step.inputs[0])
            is_rest = rest is not None and plain(rest.kind) in ("rsub", "sub")
            if rest and is_rest and rest.inputs and is_made_by(around, rest.inputs[0], "eye"):
                return step
        elif plain(step.kind) == "sub" and _is_of_gain(around, step.inputs[1]):
            return step
    return None


def _is_of_gain(around: Surroundings, value: int) -> bool:
    """Whether it is a product with a gain, ``P H / s``, or ``P H`` times the inverse of ``S``."""
    product = made_by(around, value)
    if product is None or plain(product.kind) not in _OUTER:
        return False
    todo, seen = list(product.inputs), set(product.inputs)
    for _ in range(MOST_OF_GAIN):
        step = around.maker_of(todo.pop(0)) if todo else None
        if step is None:
            continue
        if plain(step.kind) in _GAINS:
            dividend = made_by(around, step.inputs[0]) if step.inputs else None
            is_solved = plain(step.kind) != "div"
            if is_solved or (dividend and plain(dividend.kind) in MATRIX_PRODUCTS):
                return True
        elif not step.counts or plain(step.kind) in _PASSED | _OUTER:
            todo += [each for each in step.inputs if each not in seen]
            seen.update(step.inputs)
    return False


def _combined(around: Surroundings) -> Iterator[Step]:
    """The sums, products and matrix products that led to the operand, the nearest first."""
    todo = [] if around.culprit is None else [around.culprit]
    seen = set(todo)
    for _ in range(MOST_STEPS):
        step = around.maker_of(todo.pop(0)) if todo else None
        if step is None or (step.counts and plain(step.kind) not in _COMBINES):
            continue
        yield step
        todo += [each for each in step.inputs if each not in seen]
        seen.update(step.inputs)


def _negative(case: Case) -> float | None:
    """The magnitude of the operand, if it is a negative number."""
    number = case.negative_operand
    return -number if number is not None and case.dtype in FORMATS else None


def _roundings(magnitude: float, dtype: str) -> float:
    return ROUNDINGS * FORMATS[dtype].eps * magnitude


def _cancelled(around: Surroundings, step: Step, dtype: str) -> Cancelled | None:
    name, made = plain(step.kind), around.range_of(step.outputs[0]) if step.outputs else None
    read = [around.range_of(value) for value in step.inputs]
    ranges = [each for each in read if each is not None]
    if made is None or len(ranges) < len(read) or not 0 < made.abs_max < math.inf:
        return None
    if name in _DIFFERENCES and len(ranges) == 2:
        least = max(each.abs_max for each in ranges)
    elif name in MATRIX_PRODUCTS and len(ranges) == 2:
        # One row at least has a term as large as this.
        one, other = ranges
        least = max(one.abs_max * other.abs_min, one.abs_min * other.abs_max)
    else:
        return None
    largest = max(each.abs_max for each in ranges)
    is_one = least < math.inf and made.abs_max <= _roundings(least, dtype)
    return Cancelled(step, largest) if is_one else None


def _is_distance(around: Surroundings, step: Step) -> bool:
    """It subtracts twice a product, or from a sum of two."""
    made = [made_by(around, value) for value in step.inputs]
    return any(
        each is not None
        and (
            (plain(each.kind) == "mul" and 2 in map(abs, each.literals))
            or (plain(each.kind) == "add" and len(set(each.inputs)) == 2)
        )
        for each in made
    )
