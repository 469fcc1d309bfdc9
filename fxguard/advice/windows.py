"""What a transform has left at the end of its range: windows that add up to 0, a rounded tanh.

Knows nothing of torch.
"""

from __future__ import annotations

import linecache

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain

__all__ = ["is_of_tanh", "is_sum_of_windows"]

_STORED = names_in("cat copy empty setitem stack tensor zeros")
_ADDS_FRAMES = names_in("col2im conv_transpose1d fold overlap_add")


def is_sum_of_windows(case: Case) -> bool:
    """It is divided by frames that were added up, one shifted against the other."""
    step = made_by(case.around, case.around.culprit)
    return step is not None and plain(step.kind) in _ADDS_FRAMES and not case.is_differentiated()


def is_of_tanh(case: Case) -> bool:
    """It is 1 or -1, was stored or given, and the same file takes a tanh."""
    source = case.around.step.source
    is_end = bool(case.operands) and abs(case.operands[0].low) == 1
    step = made_by(case.around, case.around.culprit)
    if source is None or not is_end or not (step is None or plain(step.kind) in _STORED):
        return False
    return any("tanh(" in x.replace("atanh(", "") for x in linecache.getlines(source.file))
