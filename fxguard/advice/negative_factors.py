"""The factor that turned a product of single numbers negative: ``rho - 4`` of ``(rho - 4) * c``.

Of a formula that holds only above a number, as the rectification of RAdam. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping

from fxguard.advice._patterns import made_by, number_of
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.differences import differences_at

__all__ = ["words_of_factor"]

MOST_STEPS = 16
CLOSE = 1e-3  # of the larger number: the difference of two magnitudes is that of their numbers


def words_of_factor(case: Case) -> Mapping[str, str]:
    """``{"factor": "rho - 4", "number": "-0.0003"}``; {} without one that is known to be negative.

    Only magnitudes are known. That of ``x - 4`` tells the sign of x.
    """
    if case.negative_operand is None or case.evidence is None or case.evidence.index:
        return {}
    around = case.around
    pairs = ((step, _below(around, step)) for step in _factors(around))
    negative = [(step, *found) for step, found in pairs if found]
    if len(negative) != 1:
        return {}
    step, by, number = negative[0]
    made = around.maker_of(step.inputs[0])
    name = "" if made is None or made.source is None else target_of(made.source)
    texts = [
        ast.unparse(each)
        for each in differences_at(around.step.source)
        if isinstance(each.right, ast.Constant) and each.right.value == by
    ]
    text = texts[0] if len(texts) == 1 else f"{name} - {by:g}"
    return {"factor": text, "number": f"{number:.4g}"} if text in texts else {}


def _factors(around: Surroundings) -> Iterator[Step]:
    """The differences that are factors or divisors of the operand, and not all of it."""
    whole = made_by(around, around.culprit)
    todo = [] if around.culprit is None else [around.culprit]
    for _ in range(MOST_STEPS):
        step = around.maker_of(todo.pop(0)) if todo else None
        if step is None:
            continue
        if plain(step.kind) == "sub" and step is not whole:
            yield step
        elif plain(step.kind) in ("div", "mul") or not step.counts:
            todo += dict.fromkeys(step.inputs)


def _below(around: Surroundings, step: Step) -> tuple[float, float] | None:
    """The number that ``x - number`` subtracts and its result, if that is negative."""
    by, ranges = number_of(step), [around.range_of(each) for each in (*step.inputs, *step.outputs)]
    if by is None or by <= 0 or step.number_first or len(ranges) != 2:
        return None
    sizes = [math.nan if x is None or x.abs_min != x.abs_max else x.abs_max for x in ranges]
    difference = sizes[0] - by
    is_known = math.isclose(abs(difference), sizes[1], abs_tol=CLOSE * max(sizes[0], by))
    return (by, difference) if is_known and difference < 0 else None
