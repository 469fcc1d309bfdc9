"""Numbers so large that their dtype holds them in coarse steps, such as times since 1970.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.positive import made_at
from fxguard.advice.written_operands import titled
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["is_coarse_difference", "words_of_steps"]

COARSE = 0.1  # between numbers next to each other
MOST_STEPS = 16  # in one walk

_DIFFERENCES = frozenset(["diff", "rsub", "sub"])
_SCALED = _DIFFERENCES | {"add", "div", "mul"}


def is_coarse_difference(case: Case) -> bool:
    """Whether the operand is a difference of numbers that the dtype holds so coarsely.

    They may be scaled, and have lost their first value, in between.
    """
    return _coarse(case) is not None


def words_of_steps(case: Case) -> Mapping[str, str]:
    """How large the numbers are, how far apart the next to each other, and where."""
    found = _coarse(case)
    assert found is not None
    step, largest = found
    steps = 2.0 ** math.floor(math.log2(largest)) * _eps(case)
    return {"largest": f"{largest:.3g}", "steps": f"{steps:.3g}", "made": titled(step)}


def _coarse(case: Case) -> tuple[Step, float] | None:
    """The first difference on the way of numbers that are held so, and the largest of them."""
    step, is_difference = made_at(case.around, case.around.culprit), False
    for _ in range(MOST_STEPS):
        if step is None or plain(step.kind) not in _SCALED:
            return None
        is_difference = is_difference or (plain(step.kind) in _DIFFERENCES and not step.literals)
        if not is_difference:
            return None
        largest = max((_magnitude(case, value) for value in step.inputs), default=0.0)
        if plain(step.kind) in _DIFFERENCES and COARSE < largest * _eps(case) < math.inf:
            return step, largest
        step = made_at(case.around, step.inputs[0])
    return None


def _eps(case: Case) -> float:
    form = FORMATS.get(case.dtype)
    return 0.0 if form is None else form.eps


def _magnitude(case: Case, value: int) -> float:
    found = case.around.range_of(value)
    return 0.0 if found is None else found.abs_max
