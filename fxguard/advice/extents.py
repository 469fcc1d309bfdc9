"""Logarithms of lengths that are differences of data: a box that a crop has cut has the width 0.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._patterns import number_of
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step

__all__ = ["words_of_extent"]

MOST_STEPS = 16  # from the logarithm back to a difference
_BOUND = 1e-12  # what one would take
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | {"stack", "cat"}


def words_of_extent(case: Case) -> Mapping[str, str]:
    """``{"made": "sub (boxes.py:50)", "bound": "-28"}`` of data without a gradient; {} of others.

    All that is put together there has to be such differences, perhaps divided by what is given.
    """
    culprit = case.around.culprit
    is_zero = bool(case.operands) and case.operands[0].low == case.operands[0].high == 0
    if culprit is None or not is_zero or case.is_differentiated():
        return {}
    step = _difference(case, culprit, MOST_STEPS)
    if step is None:
        return {}
    base = {"log2": 2.0, "log10": 10.0}.get(case.name, math.e)
    return {"made": titled(step), "bound": f"{math.log(_BOUND, base):.0f}"}


def _difference(case: Case, value: int, depth: int) -> Step | None:
    """The operation that took it; None if something else made any of the elements."""
    step = case.around.maker_of(value)
    if step is None or not depth or not step.inputs:
        return None
    name = plain(step.kind)
    if name in ("sub", "diff") and number_of(step) is None:
        return step
    if name in _PASSED and len(step.inputs) > 1:
        found = [_difference(case, each, depth - 1) for each in step.inputs]
        return found[0] if all(found) else None
    is_quotient = name == "div" and not step.number_first
    return _difference(case, step.inputs[0], depth - 1) if is_quotient or name in _PASSED else None
