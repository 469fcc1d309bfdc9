"""What led to an origin, and its consequences, from the numbers of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fxguard.batch.dataflow import DataFlow
from fxguard.findings import Climb, Origin
from fxguard.formats import limit_of
from fxguard.graph.tables import CASTS
from fxguard.measure.details import Detail
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Range, Role
from fxguard.verdict.origins import Verdict

__all__ = [
    "Back",
    "Beyond",
    "Spread",
    "beyond",
    "climb_to",
    "growth_of",
    "way_back",
    "with_counts",
]

OF_NO_NUMBERS = ("_like",)  # what operations are called that read a shape
MOST_STEPS = 3  # named in a climb
LEAST_GROWTH = 1.5  # worth telling
SUDDEN = 1e6  # growth in one operation that is a cause, and not a part of one
MOST_NAMES = 3  # of operations that a bad value spread to


# Gives the value of another batch that was given to this one as one of its values, if there is one.
Beyond = Callable[[DataFlow, int], tuple[DataFlow, int] | None]


def climb_to(flow: DataFlow, blame: Blame, beyond: Beyond) -> tuple[Climb, ...]:
    """The operations that contributed most to the magnitude that overflowed.

    The walk goes back from the origin along the largest operand of each operation, and keeps the
    steps whose output is largest compared with their operands, in order of execution.

    Args:
        flow: the batch of the origin.
        blame: the origin.
        beyond: see :data:`Beyond`.
    """
    steps = list(_walk(flow, blame, beyond))
    steps.sort(key=lambda step: step[1].after / step[1].before, reverse=True)
    kept = [pair for pair in steps if pair[1].after / pair[1].before >= LEAST_GROWTH]
    return tuple(climb for _, climb in sorted(kept[:MOST_STEPS], key=lambda pair: pair[0]))


def growth_of(flow: DataFlow, blame: Blame, beyond: Beyond) -> str:
    """``exp (vae.py:21), which made 8.5e+21 of 50, out of numbers up to 255``; "" if nothing grew.

    The numbers are those that the walk of :func:`climb_to` ends with, such as a model's input.

    Args:
        flow: as for :func:`climb_to`.
        blame: likewise.
        beyond: likewise.
    """
    steps = [climb for _, climb in _walk(flow, blame, beyond)]
    most = max(steps, key=lambda climb: climb.after / climb.before, default=None)
    if most is None or most.source is None or most.after < SUDDEN * most.before:
        return ""
    text = f"{most.title} ({most.source.place}), which made {most.after:.2g} of {most.before:.3g}"
    first = steps[-1].before
    return text if first == most.before else f"{text}, out of numbers up to {first:.3g}"


def with_counts(origin: Origin, detail: Detail) -> Origin:
    """An origin with the counts of its bad tensor."""
    return replace(
        origin,
        numel=detail.numel,
        nan_count=detail.nan_count,
        posinf_count=detail.posinf_count,
        neginf_count=detail.neginf_count,
        largest_finite=detail.largest_finite,
        first_index=detail.first_index,
        rows=detail.rows,
        row_count=detail.row_count,
        columns=detail.columns,
    )


def beyond(flow: DataFlow, blame: Blame, abs_max: Callable[[int], float]) -> list[int]:
    """The operands that autocast turned into infinities when it cast them for an operation.

    Args:
        flow: the batch.
        blame: the result of the operation, in the dtype that autocast chose.
        abs_max: largest magnitude of a value.
    """
    if blame.step is None:
        return []
    step, dtype = flow.steps[blame.step], flow.values[blame.value].dtype
    limit = limit_of(dtype)
    cast = [v for v in step.inputs if flow.values[v].dtype == "float32" != dtype]
    if step.kind in CASTS or dtype == "float64":
        return []
    return [value for value in dict.fromkeys(cast) if limit < abs_max(value) < math.inf]


@dataclass(frozen=True, slots=True)
class Back:
    """One operation on the way back from an overflow, and the operand that it is followed to."""

    flow: DataFlow
    step: Step
    operand: int  # a value of the flow
    before: float  # its largest magnitude
    after: float  # that of what the operation made


def _walk(flow: DataFlow, blame: Blame, beyond: Beyond) -> Iterator[tuple[int, Climb]]:
    """The operations on the way back, each with a number that is larger the later it ran."""
    for number, back in enumerate(way_back(flow, blame, beyond)):
        step = back.step
        yield -number, Climb(step.title, back.before, back.after, step.source)


def way_back(flow: DataFlow, blame: Blame, beyond: Beyond) -> Iterator[Back]:
    """The operations on the way back from an overflow, each along its largest operand.

    Args:
        flow: as for :func:`climb_to`.
        blame: likewise.
        beyond: likewise.
    """
    makers: dict[int, dict[int, int]] = {}  # of each flow: value to the index of its step
    seen: set[tuple[int, int]] = set()
    value = None if blame.step is None else _largest(flow, flow.steps[blame.step])
    while value is not None and (id(flow), value) not in seen:
        seen.add((id(flow), value))
        if id(flow) not in makers:
            makers[id(flow)] = {v: i for i, step in enumerate(flow.steps) for v in step.outputs}
        index = makers[id(flow)].get(value)
        if index is None:
            before_flow = beyond(flow, value)
            if before_flow is None:
                return
            flow, value = before_flow
            continue
        step = flow.steps[index]
        operand = None if step.kind.endswith(OF_NO_NUMBERS) else _largest(flow, step)
        if operand is not None and (before := _magnitude(flow, operand)):
            yield Back(flow, step, operand, before, _magnitude(flow, value) or 0.0)
        value = operand


def _largest(flow: DataFlow, step: Step) -> int | None:
    """The operand with the largest finite magnitude, except weights."""
    operands = [v for v in step.inputs if flow.values[v].role in (Role.MADE, Role.INPUT)]
    known = [value for value in operands if _magnitude(flow, value) is not None]
    return max(known, key=lambda value: _magnitude(flow, value) or 0.0, default=None)


def _magnitude(flow: DataFlow, value: int) -> float | None:
    number = flow.ranges[value]
    if isinstance(number, Range) and math.isfinite(number.abs_max):
        return number.abs_max
    return None


class Spread:
    """The operations that bad values reached: one look at all of them, for all origins."""

    def __init__(self, flow: DataFlow, verdict: Verdict) -> None:
        self._reached: dict[Blame, list[int]] = {}
        self._flow, self._sources = flow, verdict.sources
        for index, step in enumerate(flow.steps if verdict.sources else ()):
            if step.counts:
                for blame in {x for value in step.outputs for x in self._sources.get(value, ())}:
                    self._reached.setdefault(blame, []).append(index)

    def of(self, blame: Blame) -> tuple[tuple[str, ...], int, bool]:
        """The operations that the bad value of an origin reached.

        Returns:
            Titles of the first ones, how many there are, and whether the model returned the value.
        """
        reached = [index for index in self._reached.get(blame, ()) if index != blame.step]
        titles = dict.fromkeys(self._flow.steps[index].title for index in reached)
        returned = any(blame in self._sources.get(value, ()) for value in self._flow.results)
        return tuple(titles)[:MOST_NAMES], len(reached), returned
