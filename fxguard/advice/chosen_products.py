"""Products with an infinity that a ``where`` leaves out afterwards: ``where(legal, p * log_p, 0)``.

The forward is finite. The backward multiplies 0 by the infinity. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.signs import choice_after
from fxguard.advice.written_operands import operand_in
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.named import argument_text, operand_text, without_parentheses

__all__ = ["words_of_argument", "words_of_product"]


def words_of_product(case: Case) -> Mapping[str, str]:
    """``{"x": "log_p", "instead": "torch.where(legal, log_p, 0)"}``; {} if the lines do not tell.

    The factor that is infinite is the one to choose before the product.
    """
    around, evidence = case.around, case.evidence
    chosen = next((step for step in around.read_by if plain(step.kind) == "where"), None)
    if evidence is None or chosen is None or chosen.source is None or around.step.source is None:
        return {}
    infinite = [i for i, each in enumerate(evidence.operands) if math.isinf(each.low)]
    if len(infinite) != 1 or len(evidence.operands) != 2:
        return {}
    x = argument_text(around.step.source.code, "mul", infinite[0])
    condition = argument_text(chosen.source.code, "where", 0)
    if not x or not condition:
        return {}
    made = around.step.outputs[:1]
    sides = (x, "0") if chosen.inputs[:1] == made else ("0", x)
    return {"x": x, "instead": f"torch.where({condition}, {', '.join(sides)})"}


def words_of_argument(case: Case) -> Mapping[str, str]:
    """``{"such": ", such as torch.where(x <= 0.04, 1, x)"}``; "" if the lines do not tell."""
    chosen, x = choice_after(case), without_parentheses(operand_in(case.around))
    sides = None if chosen is None or not x else _sides(case, chosen, x)
    return {"such": "" if sides is None else f", such as torch.where({', '.join(sides)})"}


def _sides(case: Case, chosen: Step, x: str) -> tuple[str, str, str] | None:
    """The condition, and what is taken where it is true and where it is false."""
    code = "" if chosen.source is None else chosen.source.code
    if plain(chosen.kind).startswith("masked_fill"):
        condition, is_first = argument_text(code, "masked_fill", 1), False
    else:
        condition = argument_text(code, "where", 0)
        holds = [_holds(case, argument_text(code, "where", i)) for i in (1, 2)]
        if holds.count(True) != 1:
            return None
        is_first = holds[0]
    if not condition:
        return None
    return (condition, x, case.safe) if is_first else (condition, case.safe, x)


def _holds(case: Case, text: str) -> bool:
    """Whether an expression is what the operation's line assigns, or has the operation inside."""
    source = case.around.step.source
    target = "" if source is None else target_of(source)
    return bool(text) and (text == target or bool(operand_text(text, case.name)))
