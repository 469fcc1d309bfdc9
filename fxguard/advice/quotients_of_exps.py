"""Quotients of two exponentials that both became 0: their exponents may be subtracted before."""

from __future__ import annotations

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings, is_scaling
from fxguard.graph.poles import plain

__all__ = ["is_quotient_of_exps"]

EXPS = frozenset({"exp", "exp2"})


def is_quotient_of_exps(case: Case) -> bool:
    """It is 0 / 0, and both are exponentials, apart from factors that are numbers."""
    step, numbers = case.around.step, case.operands[:2]
    if plain(step.kind) != "div" or len(step.inputs) != 2:
        return False
    are_zero = all(each.low == each.high == 0 for each in numbers)
    return are_zero and all(_is_exp(case.around, value) for value in step.inputs)


def _is_exp(around: Surroundings, value: int) -> bool:
    step = made_by(around, value)
    while step is not None and is_scaling(step):
        step = made_by(around, step.inputs[0])
    return step is not None and plain(step.kind) in EXPS
