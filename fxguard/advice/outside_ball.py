"""Points outside the unit ball, where ``1 - |x|²`` is negative: of hyperbolic distances.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by, one_minus_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import names_of
from fxguard.advice.written_operands import titled
from fxguard.advice.zeros import NORMS
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of

__all__ = ["words_of_ball"]

MOST_STEPS = 16  # back from an operand
LEAST = 1e-5  # by which 1 - |x|² is below 0 where a point is outside
SOLVES = ("solve", "solve_triangular")  # of a covariance

_PASSED = names_in("add div mul neg reciprocal rsub sub")


def words_of_ball(case: Case) -> Mapping[str, str]:
    """``{"norm": "uu", "less": "sub (hyp.py:44)"}``; {} if no 1 - |x|² is behind the operand."""
    todo: list[int | None] = [case.around.culprit]
    for _ in range(MOST_STEPS):
        value = todo.pop(0) if todo else None
        step = made_by(case.around, value)
        if step is None:
            if not todo:
                return {}
            continue
        norm = one_minus_of(step)
        if norm is not None and _is_of_squares(case, norm):
            if _is_rounded(case, step):
                return {}
            square = made_by(case.around, norm)
            name = "" if square is None or square.source is None else target_of(square.source)
            return {"norm": name or "|x|²", "less": titled(step)}
        if plain(step.kind) in _PASSED:
            todo += step.inputs
    return {}


def _is_rounded(case: Case, less: Step) -> bool:
    """Whether the failing operation reads 1 - |x|² itself, and it is below 0 by rounding alone."""
    if case.around.culprit not in less.outputs:
        return False
    operands = [x for x in case.operands if x.dtype]
    return bool(operands) and -LEAST < operands[0].low < 0


def _is_of_squares(case: Case, value: int) -> bool:
    """Whether a value is a sum of squares, or the square of a norm: of vectors, not of numbers."""
    made = made_by(case.around, value)
    behind: list[Step] = [] if made is None else [made, *case.around.behind_all([made])]
    names = names_of(behind)
    squared = (made_by(case.around, x) for each in behind for x in each.inputs)
    if any(each is not None and plain(each.kind).endswith(SOLVES) for each in squared):
        return False  # what data leave of a variance of 1
    is_product = any(plain(s.kind) == "mul" and len(set(s.inputs)) == 1 for s in behind)
    is_summed = "sum" in names and (is_product or not names.isdisjoint({"pow", "square"}))
    return is_summed or not names.isdisjoint(NORMS)
