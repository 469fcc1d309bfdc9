"""The part of a sum or a quotient that turned it negative, where all others are positive.

Of ``log(pos / (pos + ng))`` with exponentials ``pos`` it is ``ng``. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice._patterns import is_square_of, made_by, number_of
from fxguard.advice.case import Case
from fxguard.advice.lowered import lowered_at
from fxguard.advice.positive import POSITIVE, made_at
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.differences import differences_at

__all__ = ["words_of_part"]

LONGEST = 40  # characters of a difference
MOST_STEPS = 16


def words_of_part(case: Case) -> Mapping[str, str]:
    """``{"part": "`ng`", "maker": "sub (loss.py:62)"}``; {} if the operand itself is that part."""
    if lowered_at(case) is not None:
        return {}
    step = first = made_at(case.around, case.around.culprit)
    for _ in range(MOST_STEPS):
        inner = None if step is None else _part(case.around, step)
        if inner is None:
            break
        step = inner
    if step is None or step is first or step.source is None or plain(step.kind) != "sub":
        return {}
    texts = [ast.unparse(each) for each in differences_at(step.source)]
    is_told = len(texts) == 1 and len(texts[0]) <= LONGEST
    name = target_of(step.source) or (texts[0] if is_told else "")
    return {"part": f"`{name}`" if name else "what", "maker": titled(step)}


def _part(around: Surroundings, step: Step) -> Step | None:
    """What made the only operand that may be negative; None if there are none, or several."""
    name, number = plain(step.kind), number_of(step)
    if name not in ("add", "div", "mul") or (number is not None and number <= 0):
        return None
    if number is not None and name == "add":
        return None  # as an eps is added to what rounding may make negative
    makers = [made_by(around, each) for each in dict.fromkeys(step.inputs)]
    free = [each for each in makers if each is None or not _is_positive(each)]
    return free[0] if len(free) == 1 else None


def _is_positive(step: Step) -> bool:
    return plain(step.kind) in POSITIVE or is_square_of(step) is not None
