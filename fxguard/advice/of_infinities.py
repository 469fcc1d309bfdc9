"""Divisors that are 0 because something was divided by an infinity: ``1 / (2 * (a / inf))``.

As at the last step of a sampler, whose logarithm is infinite. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._patterns import made_by, number_of
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of

__all__ = ["words_of_infinite_divisor"]

MOST_STEPS = 8


def words_of_infinite_divisor(case: Case) -> Mapping[str, str]:
    """``{"quotient": "`r` (dpm.py:43)", "infinite": "`h`", "made": "sub (dpm.py:38)"}``; or {}."""
    around = case.around
    step = made_by(around, around.culprit)
    for _ in range(MOST_STEPS):
        is_scaled = step is not None and plain(step.kind) in ("mul", "neg")
        if step is None or not is_scaled or (number_of(step) is None and plain(step.kind) != "neg"):
            break
        step = made_by(around, step.inputs[0])
    if step is None or plain(step.kind) != "div" or len(step.inputs) != 2:
        return {}
    dividend, divisor = map(around.range_of, step.inputs)
    maker = made_by(around, step.inputs[1])
    if dividend is None or divisor is None or maker is None:
        return {}
    if divisor.abs_min != math.inf or dividend.abs_max == math.inf:
        return {}
    return {"quotient": _named(step), "infinite": _named(maker), "made": titled(maker)}


def _named(step: Step) -> str:
    name = "" if step.source is None else target_of(step.source)
    return f"`{name}`" if name else titled(step)
