"""Divisors that an exponential made so small that their reciprocal does not fit.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step

__all__ = ["is_by_small_exp", "small_exp", "words_of_small_exp"]

MOST_STEPS = 16  # from a divisor back to an exponential
FAR = 40.0  # magnitude of its argument
TINY = 1e-30  # a divisor

_SUMS = names_in("bmm dot einsum matmul mean mm mul mv sum")
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | _SUMS


def small_exp(case: Case) -> Step | None:
    """The exponential of far negative numbers in sums and products behind the divisor."""
    todo = [case.around.culprit]
    for _ in range(MOST_STEPS):
        step = made_by(case.around, todo.pop(0)) if todo else None
        if step is None:
            if todo:
                continue
            return None
        if plain(step.kind) == "exp":
            read = case.around.range_of(step.inputs[0]) if step.inputs else None
            if read is None or read.abs_max > FAR:  # not known of a backward
                return step
        elif plain(step.kind) in _PASSED:
            todo += step.inputs
    return None


def is_by_small_exp(case: Case) -> bool:
    """It divides an ordinary number by one that an exponential has made tiny."""
    tensors = [each for each in case.operands if each.dtype]
    is_tiny = bool(tensors) and 0 < abs(tensors[-1].low) < TINY
    return is_tiny and small_exp(case) is not None


def words_of_small_exp(case: Case) -> Mapping[str, str]:
    """``{"exp": "exp (ot.py:12)", "product": "matmul (ot.py:14)"}``."""
    step, made = small_exp(case), made_by(case.around, case.around.culprit)
    return {
        "exp": "exp" if step is None else titled(step),
        "product": "the product" if made is None or made is step else titled(made),
    }
