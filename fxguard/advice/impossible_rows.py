"""Rows of a ``logsumexp`` in which no term is possible: what it runs over, what masks its terms.

As where a likelihood sums out a number that nobody has seen. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.iterated import iterated_at
from fxguard.source.ranges import range_behind

__all__ = ["has_impossible_row", "words_of_emptied", "words_of_row"]

MOST_STEPS = 256  # in one walk


def has_impossible_row(case: Case) -> bool:
    """Its row is -inf alone, which reached the loss, and no recursion over steps begins with it.

    Where a later sum left it out, it is the gradient that is bad: then the -inf is meant.
    """
    made = case.around.range_of(case.around.made)  # not known of a backward
    if made is None or math.isfinite(made.abs_max):
        return False
    count = case.operands[0].count if case.operands else 0
    around = case.around
    is_again = any(
        each is not around.step and plain(each.kind) == case.name for each in _behind(case)
    )
    source = around.step.source
    is_again = is_again or (source is not None and iterated_at(source) is not None)
    return count > 1 and not is_again


def words_of_row(case: Case) -> Mapping[str, str]:
    """What to do about the terms of the row, how many they are, and where they are masked."""
    behind, source = _behind(case), case.around.step.source
    masked = {s.source.place for s in behind if s.infinite_literal and s.source is not None}
    where = f", masked in {masked.pop()}" if len(masked) == 1 else ""
    found = None if source is None else range_behind(source)
    extend = f"keep a term of each row of {case.name} possible"
    if found is not None:
        extend = f"extend `{found[0]}` ({found[1].place}) if {case.name} runs over it"
    return {"extend": extend, "count": str(case.operands[0].count), "where": where}


def words_of_emptied(case: Case) -> Mapping[str, str]:
    """The ``logsumexp`` that made the -inf which it reads; {} if something else did."""
    around = case.around
    made = (made_by(around, value) for value in case.infinite_operands())
    found = next((s for s in made if s is not None and plain(s.kind) == "logsumexp"), None)
    return {} if found is None else {"logsumexp": titled(found)}


def _behind(case: Case) -> list[Step]:
    """All operations behind it, the nearest first."""
    around = case.around
    todo, found = deque(around.step.inputs), list[Step]()
    seen = set(todo)
    while todo and len(found) < MOST_STEPS:
        step = around.maker_of(todo.popleft())
        if step is not None:
            found.append(step)
            todo += [value for value in step.inputs if value not in seen]
            seen.update(step.inputs)
    return found
