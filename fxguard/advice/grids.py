"""Points of a grid that begins at 0, by which an equation divides: ``u_r / r`` on an axis.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.named import variable_in

__all__ = ["grid_behind", "words_of_grid"]

MOST_STEPS = 16  # from a divisor back to its grid

_GRIDS = ("linspace", "arange", "range")
_SAME = frozenset(map(plain, MOVES | SELECTS | CASTS)) | {"clone", "detach", "requires_grad_"}


def grid_behind(case: Case) -> Step | None:
    """What made the points that are the divisor; None if it is no point of a grid."""
    value = case.around.culprit
    for _ in range(MOST_STEPS):
        step = made_by(case.around, value)
        if step is None:
            return None
        if plain(step.kind) in _GRIDS:
            return step
        if plain(step.kind) not in _SAME or not step.inputs:
            return None
        value = step.inputs[0]
    return None


def words_of_grid(case: Case) -> Mapping[str, str]:
    """``{"grid": "linspace (pde.py:8)", "point": "r"}``; {} if the divisor is no point of one."""
    grid = grid_behind(case)
    if grid is None:
        return {}
    return {"grid": titled(grid), "point": variable_in(case.bare) or case.bare}
