"""Which operation that made a bad value computed it of another value, however far back."""

from __future__ import annotations

from collections.abc import Iterable

from fxguard.advice.written_operands import titled
from fxguard.batch.dataflow import DataFlow
from fxguard.plan.blame import Blame

__all__ = ["computed_of"]


def computed_of(flow: DataFlow, value: int, origins: Iterable[Blame]) -> str:
    """``div (net.py:25) is computed of it``; "" if none of the origins is.

    Args:
        flow: the batch.
        value: an infinity that became finite numbers again, as ``2 ** -inf`` does.
        origins: what made bad values.
    """
    maker = {made: step for step in flow.steps for made in step.outputs}
    for blame in origins:
        if blame.step is None or blame.value == value:
            continue
        todo, seen = list(flow.steps[blame.step].inputs), set[int]()
        while todo:
            read = todo.pop()
            if read == value:
                return f"{titled(flow.steps[blame.step])} is computed of it"
            if read not in seen and read in maker:
                todo += maker[read].inputs
            seen.add(read)
    return ""
