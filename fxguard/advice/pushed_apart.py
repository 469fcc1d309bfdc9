"""Losses that push vectors apart without a lower bound: ``log(mean(exp(-t * distance ** 2)))``.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.positive import LAYERS
from fxguard.advice.written_operands import titled, without_parentheses, written_operand
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["distances", "words_of_distances"]

MOST_STEPS = 8  # from an exponential to distances

_DISTANCES = names_in("cdist pdist")
_SUMS = names_in("mean sum")
_BY_NUMBER = names_in("div mul")


def distances(case: Case) -> Step | None:
    """The distances of vectors that nothing bounds, which a loss makes larger; None if none.

    The backward of the logarithm made +inf, so what is minimised grows with the logarithm.
    """
    is_lowered = case.evidence is not None and case.evidence.number == math.inf
    total = made_by(case.around, case.around.culprit)
    exponential = None if total is None or not total.inputs else total.inputs[0]
    step = made_by(case.around, exponential)
    if not is_lowered or total is None or plain(total.kind) not in _SUMS:
        return None
    if step is None or plain(step.kind) != "exp":
        return None
    value, is_negative = step.inputs[0], False
    for _ in range(MOST_STEPS):
        step = made_by(case.around, value)
        if step is None or not step.inputs:
            return None
        name = plain(step.kind)
        if name in _DISTANCES or _is_difference(step):
            is_free = is_negative and all(_is_free(case, each) for each in _vectors(step))
            return step if is_free else None
        if name == "neg" or (name in _BY_NUMBER and step.literals and not step.number_first):
            is_negative ^= name == "neg" or step.literals[0] < 0
        elif name == "mul" and step.literals:
            is_negative ^= step.literals[0] < 0
        elif name not in ("pow", "sqrt", "square", "sum", "mean"):
            return None
        value = step.inputs[0]
    return None


def _is_difference(step: Step) -> bool:
    return plain(step.kind) == "sub" and len(_vectors(step)) == 2 and not step.literals


def _vectors(step: Step) -> tuple[int, ...]:
    return tuple(step.inputs[:2])


def _is_free(case: Case, value: int) -> bool:
    """A model's output or that of a layer, as it is: any numbers, and a gradient flows there."""
    step = made_by(case.around, value)
    if step is None:
        return case.around.is_differentiated(value)
    return plain(step.kind) in LAYERS


def words_of_distances(case: Case) -> Mapping[str, str]:
    """The distances, the vectors, and how small the exponentials are."""
    step = distances(case)
    if step is None or not case.operands:
        return dict.fromkeys(("vectors", "distances", "mean"), "it")
    total = made_by(case.around, case.around.culprit)
    name = without_parentheses(written_operand(step)) if plain(step.kind) in _DISTANCES else ""
    number, what = case.operands[0].low, "" if total is None else plain(total.kind)
    return {
        "vectors": f"F.normalize({name or 'x'}, dim=-1)",
        "distances": titled(step),
        "mean": f"{what} of exp is exp({math.log(number):.0f})"
        if number > 0
        else f"{what} of exp is 0",
    }
