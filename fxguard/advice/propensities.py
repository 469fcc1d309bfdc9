"""Divisors that a sigmoid has rounded to 0: ``t / g - (1 - t) / (1 - g)``.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by, one_minus_of
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of

__all__ = ["sigmoid_in_divisor", "words_of_sigmoid"]


def sigmoid_in_divisor(case: Case) -> Step | None:
    """The sigmoid whose result, or 1 less that, is a divisor; None elsewhere."""
    around = case.around
    step = made_by(around, around.culprit)
    rest = one_minus_of(step)
    if rest is not None:
        step = made_by(around, rest)
    return step if step is not None and plain(step.kind) == "sigmoid" else None


def words_of_sigmoid(case: Case) -> Mapping[str, str]:
    """The sigmoid, what it is assigned to, and which end of its range it has reached."""
    step = sigmoid_in_divisor(case)
    if step is None:
        return dict.fromkeys(("sigmoid", "p", "end"), "it")
    is_rest = one_minus_of(made_by(case.around, case.around.culprit)) is not None
    return {
        "sigmoid": titled(step),
        "p": ("" if step.source is None else target_of(step.source)) or "p",
        "end": "1" if is_rest else "0",
    }
