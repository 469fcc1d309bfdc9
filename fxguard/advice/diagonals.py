"""Matrices that are 0 on their diagonal, where each meets itself: distances of pairs.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["is_of_diagonal", "words_of_diagonal"]

LEAST = 3  # rows
MOST_STEPS = 12  # from a divisor back to differences


def is_of_diagonal(case: Case) -> bool:
    """Differences are 0 on the diagonals of square matrices, on all of them, and nowhere else."""
    evidence = case.evidence
    if evidence is None or evidence.dims < 2 or evidence.share < LEAST:
        return False
    size, rest = divmod(evidence.numel, evidence.share)
    is_square = not rest and size >= LEAST and evidence.share % size == 0
    is_on_it = evidence.index[-1] == evidence.index[-2]
    last = (evidence.dims - 1, evidence.dims - 2)
    is_more = any(dim in last for dim, _, _ in evidence.shared)
    return is_square and is_on_it and not is_more and _is_of_differences(case)


def _is_of_differences(case: Case) -> bool:
    behind = list(_behind(case))
    return bool(behind) and _is_difference(behind[-1])


def _behind(case: Case) -> Iterator[Step]:
    """The operations on the way back to the differences of pairs."""
    value = case.around.culprit
    for _ in range(MOST_STEPS):
        step = made_by(case.around, value)
        if step is None or not step.inputs:
            return
        yield step
        if _is_difference(step):
            return
        value = step.inputs[0]


def _is_difference(step: Step) -> bool:
    return plain(step.kind) == "cdist" or (plain(step.kind) == "sub" and len(step.inputs) == 2)


def words_of_diagonal(case: Case) -> Mapping[str, str]:
    """``{"eye": "torch.eye(10)"}``; with one dimension more if the sum over features keeps it."""
    evidence = case.evidence
    size = str(evidence.numel // evidence.share) if evidence is not None else "n"
    codes = (each.source.code for each in _behind(case) if each.source is not None)
    keeps = any("keepdim=True" in code for code in codes)
    return {"eye": f"torch.eye({size})" + ("[..., None]" if keeps else "")}
