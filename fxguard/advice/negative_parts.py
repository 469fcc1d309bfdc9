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
from fxguard.records import Source
from fxguard.source.assigned import statement_node, target_of

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
    name = target_of(step.source) or _difference_in(step.source)
    return {"part": f"`{name}`" if name else "what", "maker": titled(step)}


def _difference_in(source: Source) -> str:
    """The only difference that a line computes; "" if there are several, or it is long."""
    node = statement_node(source)
    found = set() if node is None else {ast.unparse(x) for x in ast.walk(node) if _is_less(x)}
    text = found.pop() if len(found) == 1 else ""
    return text if len(text) <= LONGEST else ""


def _is_less(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


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
