"""Rows into which nothing was reduced, so that they keep the infinity that they began with.

As of a node without neighbours: ``torch.full(..., -inf).scatter_reduce(0, index, x, "amax")``.
Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_passed
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.named import operand_text

__all__ = ["words_of_rows"]

MOST_STEPS = 16  # back from an operand

_REDUCE = ("index_reduce", "scatter_reduce")
_KEEP = ("add", "cat", "concat", "mul", "sub")  # an infinity stays one


def words_of_rows(case: Case) -> Mapping[str, str]:
    """``{"reduce": "scatter_reduce (gnn.py:43)", "filled": "agg.masked_fill(agg.isinf(), 0)"}``.

    {} if it reads no such infinity.
    """
    step = _reduction(case)
    if step is None:
        return {}
    source, name = step.source, ""
    if source is not None:
        name = target_of(source) or operand_text(source.code, plain(step.kind))
    name = name if name.isidentifier() else "x"
    return {"reduce": titled(step), "filled": f"{name} = {name}.masked_fill({name}.isinf(), 0)"}


def _reduction(case: Case) -> Step | None:
    """The reduction behind an infinite operand, which began with an infinity of the program."""
    todo = case.infinities()
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(todo.pop(0)) if todo else None
        if step is None:
            continue
        name = plain(step.kind).rstrip("_")
        if name in _REDUCE and step.inputs:
            start = case.around.maker_of(step.inputs[0])
            begun = [] if start is None else [start, *case.around.behind(step.inputs[0])]
            if any(each.infinite_literal for each in begun):
                return step
        elif is_passed(step) or name in _KEEP:
            todo += step.inputs
    return None
