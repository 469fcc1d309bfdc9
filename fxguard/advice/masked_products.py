"""Products of a mask with numbers that are infinite where it is False: 0 * inf is NaN.

Knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.source.named import argument_text

__all__ = ["words_of_mask"]

COMPARISON = re.compile(r"[<>]|[=!]=")


def words_of_mask(case: Case) -> Mapping[str, str]:
    """``{"mask": "(old > -5)", "maker": "exp (a.py:3)"}``; {} of other products."""
    around, step = case.around, case.around.step
    # A mask of bools or integers is in no graph, so the product has one operand and no number.
    if plain(step.kind) != "mul" or len(step.inputs) != 1 or step.literals:
        return {}
    found, maker = around.range_of(step.inputs[0]), made_by(around, step.inputs[0])
    if found is None or maker is None or found.abs_max != math.inf:
        return {}
    code = "" if step.source is None else step.source.code
    texts = [argument_text(code, "mul", position) for position in (0, 1)]
    others = [text for text in texts if text and f"{plain(maker.kind)}(" not in text]
    masks = [text for text in others if COMPARISON.search(text)] or others
    return {"mask": masks[0], "maker": titled(maker)} if len(masks) == 1 else {}
