"""Logarithms and quotients of functions that leave the range of a dtype: Bessel's, the normal's.

A logarithm, or a quotient of two, is an ordinary number where the function itself is none. Knows
nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fxguard.advice._patterns import (
    are_equal,
    factors_of,
    made_by,
    number_of,
    one_minus_of,
    one_plus_of,
    readers_of,
    terms_of,
)
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = [
    "BESSEL",
    "is_log_of_gamma",
    "is_logged",
    "is_logged_in_product",
    "is_normal_tail",
    "is_normal_tail_above",
    "is_quotient",
    "words_of_quotient",
]

BESSEL = frozenset(["i0", "i1"])

_LOGS = frozenset(["log", "log10", "log2"])
_PRODUCTS = frozenset(["div", "mul", "reciprocal"])
MOST_VALUES = 12  # in one walk
NEARLY = 1e-6  # how close a number of the program is to the root of 2


def is_logged(case: Case) -> bool:
    """The logarithm of its result is taken as it is."""
    readers = [step for step, _ in readers_of(case.around, case.around.made)]
    return any(plain(step.kind) == "log" for step in readers)


def is_logged_in_product(case: Case) -> bool:
    """The logarithm of a product or a quotient with its result is taken."""
    todo, seen = [case.around.made], {case.around.made}
    for value in todo:
        for step, _ in readers_of(case.around, value):
            if plain(step.kind) in _LOGS:
                return not is_logged(case)
            if plain(step.kind) in _PRODUCTS and len(seen) < MOST_VALUES:
                todo += [each for each in step.outputs if each not in seen]
                seen.update(step.outputs)
    return False


def is_log_of_gamma(case: Case) -> bool:
    """It is an exponential of lgamma, and the logarithm of a product with it is taken."""
    maker = made_by(case.around, case.around.culprit)
    return is_logged_in_product(case) and maker is not None and _has_gamma(case, maker)


def _has_gamma(case: Case, step: Step) -> bool:
    if plain(step.kind) == "lgamma":
        return True
    terms = terms_of(case.around, step) or list(step.inputs)
    makers = (made_by(case.around, value) for value in terms)
    return any(each is not None and plain(each.kind) == "lgamma" for each in makers)


# Quotients of Bessel functions.


def _quotients(case: Case) -> Iterator[tuple[str, str]]:
    """The functions whose quotient is taken at one operand: ("i1", "i0")."""
    around, own = case.around, case.name
    for step, read in readers_of(around, around.made):
        if plain(step.kind) != "div" or len(step.inputs) != 2:
            continue
        is_above = step.inputs[0] == read
        other = made_by(around, step.inputs[1 if is_above else 0])
        if other is None or plain(other.kind) not in BESSEL or not other.inputs:
            continue
        if are_equal(around, other.inputs[0], around.step.inputs[0]):
            pair = (own, plain(other.kind))
            yield pair if is_above else (pair[1], pair[0])


def is_quotient(case: Case) -> bool:
    """It is divided by another Bessel function of the same, or the other by it."""
    return case.name in BESSEL and any(one != other for one, other in _quotients(case))


def words_of_quotient(case: Case) -> Mapping[str, str]:
    """``{"above": "i1", "below": "i0"}``."""
    above, below = next(_quotients(case), ("i1", "i0"))
    return {"above": above, "below": below}


# The normal distribution by hand: 0.5 * (1 + erf(x / sqrt(2))), and Normal.cdf.


def _normal(case: Case) -> tuple[Step, bool] | None:
    """The erf or erfc in a probability of the normal distribution, and whether it is above it."""
    step, is_above = made_by(case.around, case.around.culprit), False
    if (rest := one_minus_of(step)) is not None:
        step, is_above = made_by(case.around, rest), True
    if step is None or not _is_halved(step):
        return None
    inner = made_by(case.around, next(iter(factors_of(step) or step.inputs)))
    if inner is None:
        return None
    if plain(inner.kind) == "erfc":
        return inner, not is_above
    for value, above in ((one_plus_of(inner), False), (one_minus_of(inner), True)):
        erf = None if value is None else made_by(case.around, value)
        if erf is not None and plain(erf.kind) == "erf":
            return erf, is_above != above
    return None


def _is_halved(step: Step) -> bool:
    number, name = number_of(step), plain(step.kind)
    return (name == "mul" and number == 0.5) or (
        name == "div" and number == 2 and not step.number_first
    )


def _is_by_root_of_two(case: Case, erf: Step) -> bool:
    step = made_by(case.around, erf.inputs[0])
    number = None if step is None else number_of(step)
    if step is None or number is None:
        return False
    name = plain(step.kind)
    number = 1 / number if name == "mul" and number else number
    is_scaled = name in ("div", "mul") and not (name == "div" and step.number_first)
    return is_scaled and abs(number - math.sqrt(2)) < NEARLY


def is_normal_tail(case: Case) -> bool:
    """It is the logarithm of the probability that a normal number is below something."""
    found = _normal(case)
    return found is not None and not found[1] and _is_by_root_of_two(case, found[0])


def is_normal_tail_above(case: Case) -> bool:
    """The same for a probability above something."""
    found = _normal(case)
    return found is not None and found[1] and _is_by_root_of_two(case, found[0])
