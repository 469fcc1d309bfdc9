"""Factors by which vectors are brought to one length, or clipped: ``g * (c / g.norm())``.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice._patterns import is_square_of, made_by, readers_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.zeros import NORMS
from fxguard.graph.poles import plain
from fxguard.source.multiplied import is_multiplied_at

__all__ = ["divides_by_root_of_squares", "is_factor_of_vectors", "words_of_vectors"]

MOST_STEPS = 16  # from a root to squares

_SUMS = names_in("add mean nansum stack sum")


def divides_by_root_of_squares(case: Case) -> bool:
    """It divides by a norm, perhaps one by hand: the root of a sum of squares."""
    step = made_by(case.around, case.around.culprit)
    if case.name != "div" or step is None or not step.inputs:
        return False
    if plain(step.kind) in NORMS:
        return True
    todo = list(step.inputs) if plain(step.kind) == "sqrt" else []
    for _ in range(MOST_STEPS):
        made = made_by(case.around, todo.pop(0)) if todo else None
        if made is None:
            continue
        if is_square_of(made) is not None:
            return True
        todo += made.inputs if plain(made.kind) in _SUMS else ()
    return False


def is_factor_of_vectors(case: Case) -> bool:
    """The same, no gradient flows there, and the vectors are multiplied by the quotient."""
    if case.is_differentiated() or not divides_by_root_of_squares(case):
        return False
    source, around = case.around.step.source, case.around
    is_product = any(plain(step.kind) == "mul" for step, _ in readers_of(around, around.made))
    return is_product and source is not None and is_multiplied_at(source)


def words_of_vectors(case: Case) -> Mapping[str, str]:
    """A bound on the factor, and an eps: that first where all are brought to one length."""
    bound = f"bound the factor, as clipping does, ({case.dividend} / {case.x}).clamp(max=1)"
    eps = f"add an eps to the norm, {case.x} + 1e-6"
    is_number = bool(re.fullmatch(r"-?[\d.e-]+", case.dividend))
    first, second = (eps, bound) if is_number else (bound, eps)
    return {"first": first, "second": second}
