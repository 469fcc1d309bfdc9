"""Matrices that are products of vectors with themselves, ``x.T @ x / n``.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._patterns import are_equal, made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_scaling
from fxguard.graph.poles import plain

__all__ = ["is_covariance"]

_PRODUCTS = names_in("bmm einsum matmul mm")


def is_covariance(case: Case) -> bool:
    """Whether the operand is such a product, perhaps times a number."""
    around = case.around
    step = made_by(around, around.culprit)
    while step is not None and is_scaling(step) and step.inputs:
        step = made_by(around, step.inputs[0])
    if step is None or plain(step.kind) not in _PRODUCTS or len(step.inputs) not in (1, 2):
        return False
    return are_equal(around, step.inputs[0], step.inputs[-1])
