"""Squares of integers that wrapped around: their sum is negative.

Knows nothing of torch.
"""

from __future__ import annotations

from typing import NamedTuple

from fxguard.advice._rules import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.source.squares import square_at

__all__ = ["Wrapped", "wrapped_square"]

MOST_STEPS = 32  # from the operand back

_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("add div mean mul sub sum")
_FROM_INTEGERS = frozenset(map(plain, CASTS)) | names_in("div double float half to true_divide")


class Wrapped(NamedTuple):
    """A square of integers."""

    squared: str  # as the program has it, "pcm"
    place: str  # of the line that squares it


def wrapped_square(case: Case) -> Wrapped | None:
    """The square of integers that a negative operand was computed from; None if it was not.

    No floating-point number has led to it, and the program's text squares something there. Such a
    square is negative only where it did not fit the type of its integers.
    """
    if case.negative_operand is None or case.around.culprit is None:
        return None
    todo = [case.around.culprit]
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(todo.pop(0)) if todo else None
        if step is None:
            return None
        name = plain(step.kind)
        if not step.inputs and name in _FROM_INTEGERS and step.source is not None:
            found = square_at(step.source)
            return None if found is None else Wrapped(found[0], found[1].place)
        if step.counts and name not in _PASSED:
            return None
        todo += step.inputs
    return None
