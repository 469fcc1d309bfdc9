"""Numbers that stand for what is missing, such as 1e20 in files of climate data.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain

__all__ = ["words_of_fill"]

LEAST = 1e10  # smaller ones may be data
MOST_STEPS = 64  # in one walk
LEAST_SHARE = 1e-3  # of a result that is of the fill value

_FILLS = names_in("index_fill index_put masked_fill scatter setitem where")  # of some elements


def words_of_fill(case: Case) -> Mapping[str, str]:
    """``{"number": "1e+20", "fill": "setitem (a.py:3)"}``; {} where there is none."""
    around = case.around
    value, largest = _largest(case, around.step.inputs)
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or largest < LEAST:
            return {}
        numbers = [x for x in step.literals if LEAST <= x < math.inf]  # below 0 it is a mask
        is_fill = plain(step.kind) in _FILLS and not step.limit_literal and bool(numbers)
        if is_fill and math.isclose(numbers[0], largest, rel_tol=1e-6):
            return {"number": f"{numbers[0]:g}", "fill": titled(step)}
        value, read = _largest(case, step.inputs)
        if read < LEAST_SHARE * largest:
            return {}
        largest = read
    return {}


def _largest(case: Case, values: tuple[int, ...]) -> tuple[int | None, float]:
    """The value with the largest number among some, and that number."""
    found: tuple[int | None, float] = (None, 0.0)
    for value in values:
        seen = case.around.range_of(value)
        if seen is not None and found[1] < seen.abs_max < math.inf:
            found = (value, seen.abs_max)
    return found
