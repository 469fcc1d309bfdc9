"""What is said of the root of a difference whose derivative is infinite.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by, number_of
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import PRODUCTS, plain
from fxguard.graph.tables import LIMITERS
from fxguard.plan.plan import Step

__all__ = ["words_of_difference"]

MOST_STEPS = 16  # from the root to its difference

BY_ROUNDINGS = ", and by roundings this difference may be below 0, too"
DISTANCES = "; torch.cdist has a gradient of 0 there"


def words_of_difference(case: Case) -> Mapping[str, str]:
    """What else is true of a difference: ``roundings`` and ``cdist``, each "" where it is not."""
    around = case.around
    step = made_by(around, around.culprit)
    is_pairs = step is not None and _is_of_pairs(around, step)
    return {
        "roundings": "" if _is_bounded(around) else BY_ROUNDINGS,
        "cdist": DISTANCES if is_pairs else "",
    }


def _is_bounded(around: Surroundings) -> bool:
    """Whether a bound lies between the difference and its root."""
    value, difference = around.culprit, made_by(around, around.culprit)
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or step is difference:
            return False
        if step.kind in LIMITERS:
            return True
        value = step.inputs[0] if step.inputs else None
    return False


def _is_of_pairs(around: Surroundings, step: Step) -> bool:
    """Whether it is ``|x|² + |y|² - 2 x y``, with a matrix product."""
    added, taken = (made_by(around, value) for value in step.inputs[:2])
    if added is None or plain(added.kind) != "add" or len(set(added.inputs)) != 2:
        return False
    if taken is not None and number_of(taken) == 2 and plain(taken.kind) == "mul":
        taken = made_by(around, taken.inputs[0])
    return taken is not None and plain(taken.kind) in PRODUCTS
