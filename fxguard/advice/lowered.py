"""State that a recursion lowers below 0, such as water in a store.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.records import Source
from fxguard.source.assigned import target_of
from fxguard.source.named import variable_in

__all__ = ["lowered_at"]

MOST_STEPS = 12  # from the operand back

_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("add sub")


def lowered_at(case: Case) -> Source | None:
    """The line that subtracts from the variable that the negative operand is, in a turn before.

    That is another line than the one that made the operand: ``s = s + rain[t]`` reads what
    ``s = s - q`` left.
    """
    name, value = variable_in(case.x), case.around.culprit
    if case.negative_operand is None or not name:
        return None
    for turn in range(MOST_STEPS):
        step = None if value is None else case.around.maker_of(value)
        if step is None or not step.inputs or (step.counts and plain(step.kind) not in _PASSED):
            return None
        if turn and plain(step.kind) == "sub" and step.source is not None:
            return step.source if target_of(step.source) == name else None
        value = step.inputs[0]
    return None
