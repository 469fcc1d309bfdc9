"""Logarithms of counts that something is divided by: ``a / deg.log()``.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice import signs
from fxguard.advice._kinds import LOG
from fxguard.advice._patterns import divides_by, made_by, readers_of
from fxguard.advice.case import Case
from fxguard.advice.written_operands import without_parentheses, written_operand
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["words_of_divided"]


def words_of_divided(case: Case) -> Mapping[str, str]:
    """``{"n": "deg"}`` if a logarithm of counts divides, which is 0 at 1 and -inf at 0; or {}."""
    log = _log(case)
    if log is None or not _divides(case, log) or not _counts(case, log):
        return {}
    return {"n": without_parentheses(written_operand(log)) or "n"}


def _log(case: Case) -> Step | None:
    if case.name in LOG:
        return case.around.step
    step = made_by(case.around, case.around.culprit)
    return step if step is not None and plain(step.kind) in LOG else None


def _divides(case: Case, log: Step) -> bool:
    return any(
        plain(step.kind) == "reciprocal" or divides_by(step, read)
        for step, read in readers_of(case.around, log.outputs[0])
    )


def _counts(case: Case, log: Step) -> bool:
    """Whether it counts: a sum of a mask, or whole numbers by another way."""
    if case.name in LOG:
        return signs.is_count_of_mask(case) or signs.divides_by_whole_numbers(case)
    counted = made_by(case.around, log.inputs[0]) if log.inputs else None
    return counted is not None and plain(counted.kind) in ("bincount", "sum")
