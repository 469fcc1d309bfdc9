"""Numbers that sigmoids make one by one, and that have to add up to less than 1.

``omega / (1 - alpha - beta)`` is negative where two such shares pass 1 together. Knows nothing of
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxguard.advice._patterns import made_by, number_of
from fxguard.advice.case import Case
from fxguard.advice.positive import made_at
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import statement_at

__all__ = ["rest_of_shares", "words_of_shares"]

MOST_DEPTH = 8  # of terms


def rest_of_shares(case: Case) -> Step | None:
    """What is left of 1 behind a negative operand, as a whole or as its divisor; None elsewhere."""
    around = case.around
    step = made_at(around, around.culprit)
    if step is not None and plain(step.kind) == "div" and step.inputs:
        step = made_by(around, step.inputs[-1])
    if step is None:
        return None
    terms = list(_terms(around, step, MOST_DEPTH))
    taken = [each for each in terms if isinstance(each, Step)]
    begins = [each for each in terms if not isinstance(each, Step)]
    are_shares = len(taken) > 1 and all(plain(each.kind) == "sigmoid" for each in taken)
    return step if are_shares and begins == [1.0] else None


def _terms(around: Surroundings, step: Step | None, depth: int) -> Iterator[Step | float | None]:
    """What is added up or subtracted: numbers, and the operations that made the tensors."""
    name = "" if step is None else plain(step.kind)
    if step is None or not depth or name not in ("add", "rsub", "sub"):
        yield step
        return
    number = number_of(step)
    if number is not None:
        yield number
    for value in step.inputs:
        yield from _terms(around, made_by(around, value), depth - 1)


def words_of_shares(case: Case) -> Mapping[str, str]:
    """Where the rest is computed, and how."""
    step = rest_of_shares(case)
    if step is None or step.source is None:
        return {"rest": "the rest"}
    return {"rest": f"{titled(step)}: {statement_at(step.source)}"}
