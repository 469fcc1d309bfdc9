"""What led to an origin, and what came of it, read off one batch's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fxguard.batch.frames import Trace
from fxguard.graph.tables import CASTS
from fxguard.plan.plan import Step
from fxguard.records import Climb, Stat
from fxguard.verdict.origins import LIMITS, Blame, Verdict

__all__ = ["beyond", "climb_to", "spread_of"]

MOST_STEPS = 3  # that a climb tells of
LEAST_GROWTH = 1.5  # that is worth telling
MOST_NAMES = 3  # of operations that a bad value spread to


def climb_to(trace: Trace, blame: Blame) -> tuple[Climb, ...]:
    """The operations that contributed most to the magnitude that overflowed.

    Walks back from the origin along the largest operand of each operation, and keeps the steps
    whose output is largest compared with what they read, in order of execution.
    """
    found = list(_walk(trace, blame))
    found.sort(key=lambda step: step[1].after / step[1].before, reverse=True)
    kept = [pair for pair in found if pair[1].after / pair[1].before >= LEAST_GROWTH]
    return tuple(climb for _, climb in sorted(kept[:MOST_STEPS], key=lambda pair: pair[0]))


def beyond(trace: Trace, blame: Blame, abs_max: Callable[[int], float]) -> list[int]:
    """The operands that autocast turned into infinities when it cast them for an operation.

    Args:
        trace: the batch.
        blame: what the operation made, in the dtype that autocast chose.
        abs_max: largest magnitude of a value.
    """
    if blame.step is None:
        return []
    step, dtype = trace.steps[blame.step], trace.values[blame.value].dtype
    limit = LIMITS.get(dtype, math.inf)
    cast = [v for v in step.inputs if trace.values[v].dtype == "float32" != dtype]
    if step.kind in CASTS or dtype == "float64":
        return []
    return [value for value in dict.fromkeys(cast) if limit < abs_max(value) < math.inf]


def _walk(trace: Trace, blame: Blame) -> Iterator[tuple[int, Climb]]:
    maker = {value: i for i, step in enumerate(trace.steps) for value in step.outputs}
    index = blame.step
    seen: set[int] = set()
    value = None if index is None else _largest(trace, trace.steps[index])
    while value is not None and (index := maker.get(value)) is not None and index not in seen:
        seen.add(index)
        step = trace.steps[index]
        operand = _largest(trace, step)
        if operand is not None and (before := _magnitude(trace, operand)):
            title = f"{step.module} {step.kind}".strip()
            yield index, Climb(title, before, _magnitude(trace, value) or 0.0, step.source)
        value = operand


def _largest(trace: Trace, step: Step) -> int | None:
    """The operand of largest finite magnitude, weights aside."""
    operands = [v for v in step.inputs if trace.values[v].kind in ("made", "input")]
    known = [value for value in operands if _magnitude(trace, value) is not None]
    return max(known, key=lambda value: _magnitude(trace, value) or 0.0, default=None)


def _magnitude(trace: Trace, value: int) -> float | None:
    number = trace.stats[value]
    if isinstance(number, Stat) and math.isfinite(number.abs_max):
        return number.abs_max
    return None


def spread_of(trace: Trace, verdict: Verdict, blame: Blame) -> tuple[tuple[str, ...], int, bool]:
    """The operations that a bad value reached.

    Returns:
        Titles of the first of them, how many there are, and whether the model returned it.
    """
    reached = []
    for index, step in enumerate(trace.steps):
        if index == blame.step or not step.counts:
            continue
        if any(blame in verdict.sources.get(value, ()) for value in step.outputs):
            reached.append(f"{step.module} {step.kind}".strip())
    titles = tuple(dict.fromkeys(reached))
    returned = any(blame in verdict.sources.get(value, ()) for value in trace.results)
    return titles[:MOST_NAMES], len(reached), returned
