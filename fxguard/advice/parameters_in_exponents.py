"""Exponentials of a parameter: ``exp(-log_var)``, which nothing keeps from growing.

As the weight of a loss in a sum of several (Kendall et al., 2018), where that loss is 0. Knows
nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import number_of
from fxguard.advice.case import Case
from fxguard.advice.signs import is_free_exponent
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.records import Role
from fxguard.source.assigned import assignment_of

__all__ = ["words_of_exponent"]

MOST_STEPS = 8
ASKS_FOR_GRADIENT = ("Parameter(", "requires_grad=True", "requires_grad_(")
_PASSED = CASTS | MOVES | SELECTS


def words_of_exponent(case: Case) -> Mapping[str, str]:
    """``{"parameter": "`s`"}`` of ``exp(-s)``; {} where the exponent is no parameter alone."""
    if case.is_half() or not is_free_exponent(case):
        return {}
    around, written = case.around, case.variable
    value = _alone(around)
    is_weight = value is not None and around.values[value].role is Role.WEIGHT
    if not is_weight and not _is_assigned_as_one(case):
        return {}
    if written == "it" and value is not None:
        written = f"`{around.values[value].name}`"
    return {"parameter": written}


def _alone(around: Surroundings) -> int | None:
    """What the exponent is, or a part of it, perhaps times a number; None if that is not known."""
    value = around.culprit
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None:
            return value
        name = plain(step.kind)
        is_scaled = name == "neg" or (name in ("div", "mul") and number_of(step) is not None)
        if not step.inputs:  # a new tensor, or one that nobody has seen
            return None if is_scaled or name in ("div", "mul") else value
        if step.kind not in _PASSED and not is_scaled:
            return None
        value = step.inputs[0]
    return None


def _is_assigned_as_one(case: Case) -> bool:
    """Whether the script has assigned a tensor that requires a gradient to the variable."""
    source, name = case.around.step.source, case.variable.strip("`")
    if source is None or not name.isidentifier():
        return False
    assigned = assignment_of(name, source)
    return assigned is not None and any(each in assigned.code for each in ASKS_FOR_GRADIENT)
