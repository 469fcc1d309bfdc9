"""Differences of two infinities that stand for what is out of range: ``ranges[1:] - ranges[:-1]``.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.source.named import argument_text, variables_in

__all__ = ["words_of_infinities"]


def words_of_infinities(case: Case) -> Mapping[str, str]:
    """``{"name": "ranges", "bound": "max"}``; {} where the terms are not of one variable."""
    source = case.around.step.source
    if source is None or len(case.operands) != 2:
        return {}
    first, second = (each.low for each in case.operands)
    if not math.isinf(first) or first != second or any(each.count != 1 for each in case.operands):
        return {}
    names = [variables_in(argument_text(source.code, "sub", i)) for i in (0, 1)]
    common = sorted(names[0] & names[1])
    if len(common) != 1:
        return {}
    return {"name": common[0], "bound": "max" if first > 0 else "min"}
