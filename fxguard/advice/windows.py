"""Divisors that frames of a signal add up to, which are 0 at its ends: overlap-add.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain

__all__ = ["is_sum_of_windows"]

_ADDS_FRAMES = names_in("col2im conv_transpose1d fold overlap_add")


def is_sum_of_windows(case: Case) -> bool:
    """It is divided by frames that were added up, one shifted against the other."""
    step = made_by(case.around, case.around.culprit)
    return step is not None and plain(step.kind) in _ADDS_FRAMES and not case.is_differentiated()
