"""Exponentials that overflow in a divisor: the quotient is 0 there, and its gradient is NaN.

Planck's law, ``1 / (exp(x) - 1)``, is one. Its quotient is written with ``exp(-x)``, which becomes
0 where ``exp(x)`` overflows. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fxguard.advice import becomes
from fxguard.advice._patterns import are_equal, divides_by, is_square_of, minus_one_of, readers_of
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["divides", "words_of_quotient"]

MOST_VALUES = 32  # in one walk
_OF_DIVISORS = frozenset(["add", "div", "mul", "pow", "rsub", "square", "sub"])


def divides(form: str) -> Callable[[Case], bool]:
    """Something that is not made of its result is divided by it, perhaps times something else.

    Args:
        form: ``"x"``, or ``"x - 1"`` where the divisor is its result less 1.
    """

    def fits(case: Case) -> bool:
        quotients = list(_quotients(case, form))
        return bool(quotients) and not any(_is_of_it(case, *each) for each in quotients)

    return fits


def words_of_quotient(case: Case) -> Mapping[str, str]:
    """``{"quotient": "the quotient (planck.py:9)"}``: of other divisors; {} if there is none."""
    if any(fits(case) for fits in _OF_OWN_RULES):
        return {}
    again = (each.outputs[0] for each in case.around.steps_of(case.around.step.kind))
    todo = [x for x in again if are_equal(case.around, x, case.around.made)]
    for value in todo:
        for step, read in readers_of(case.around, value):
            if plain(step.kind) == "reciprocal" or divides_by(step, read):
                is_here = step.source is None or step.source == case.around.step.source
                at = "" if is_here or step.source is None else f" ({step.source.place})"
                return {"quotient": f"the quotient{at}"}
            if plain(step.kind) in _OF_DIVISORS and len(todo) < MOST_VALUES:
                todo += step.outputs
    return {}


def _quotients(case: Case, form: str) -> Iterator[tuple[Step, int]]:
    """The quotients by what a form says, each with its divisor."""
    todo = [(case.around.made, form == "x")]
    for value, is_divisor in todo:
        for step, read in readers_of(case.around, value):
            if is_divisor and (plain(step.kind) == "reciprocal" or divides_by(step, read)):
                yield step, read
            is_factor = plain(step.kind) == "mul" and is_square_of(step) is None
            is_less_one = not is_divisor and minus_one_of(step) == read
            if ((is_divisor and is_factor) or is_less_one) and len(todo) < MOST_VALUES:
                todo += [(each, True) for each in step.outputs]


def _is_of_it(case: Case, quotient: Step, divisor: int) -> bool:
    """Whether the other side of a quotient is made of it."""
    todo = [each for each in quotient.inputs if each != divisor]
    for value in todo:
        if are_equal(case.around, value, case.around.made):
            return True
        step = case.around.maker_of(value)
        if step is not None and len(todo) < MOST_VALUES:
            todo += step.inputs
    return False


_OF_OWN_RULES = (
    divides("x"),
    divides("x - 1"),
    becomes.divides_by_one_plus,
    becomes.is_normalized,
    becomes.is_scaled_sigmoid_by_hand,
    becomes.is_sigmoid_by_hand,
    becomes.is_tanh_by_hand,
)
