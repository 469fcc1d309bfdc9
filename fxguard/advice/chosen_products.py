"""Products with an infinity that a ``where`` leaves out afterwards: ``where(legal, p * log_p, 0)``.

The forward is finite. The backward multiplies 0 by the infinity. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.source.named import argument_text

__all__ = ["words_of_product"]


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
