"""Loops: the turn in which an origin arose, and how much its result had grown until then.

Turns are counted from 0, like batches. Growth is told of a recurrence only: the result of each turn
leads to that of the next one. Images, layers or batches that a loop takes one by one do not grow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from fxguard.batch.dataflow import DataFlow
from fxguard.graph.poles import plain
from fxguard.measure.details import Detail
from fxguard.plan.blame import Blame
from fxguard.plan.plan import FramePlan
from fxguard.records import Range, RowRole
from fxguard.source.times import is_chain, times_in

__all__ = ["turn_in_loop", "turn_of", "turn_text"]

LEAST_TURNS = 3  # a module that is called twice is shared, not a loop
LEAST_GROWTH = 1.1  # per turn, worth telling


def turn_of(flow: DataFlow, blame: Blame) -> str:
    """The turn of a Python loop in which an operation made a bad value.

    The loop is over the line of the operation, or around a module. Of a line all runs count since
    the innermost module was called, whatever loops they are in and whichever graphs they are of.

    Returns:
        ``call 37 of `cell` in this forward; grew 2.0 times a call since call 0``; "" if there is
        no loop.
    """
    places = (place for place, frame in enumerate(flow.frames) if frame.step == blame.step)
    if blame.step is None or (place := next(places, None)) is None:
        return ""
    module = flow.steps[blame.step].module
    return _turn_of_line(flow, place, module) or _turn_of_module(flow, place, module)


def turn_in_loop(detail: Detail) -> str:
    """The turn of a ``scan``, a ``while_loop`` or a ``map`` in which a value turned bad."""
    if not detail.loop:
        return ""
    sizes = detail.magnitudes
    return turn_text(detail.iteration, sizes, what="iteration", where=detail.loop)


def turn_text(turn: int, magnitudes: Sequence[float], *, what: str, where: str) -> str:
    """One turn in words, with the growth of a value until then.

    Args:
        turn: counted from 0.
        magnitudes: the largest magnitude of the value in each earlier turn; NaN if there is none.
        what: ``"call"``, ``"iteration"`` or ``"run"``.
        where: the loop.
    """
    text = f"{what} {turn} of {where}"
    known = [(i, size) for i, size in enumerate(magnitudes[:turn]) if 0 < size < math.inf]
    if len(known) < 2:
        return text
    (first, before), (last, after) = known[0], known[-1]
    growth = (after / before) ** (1 / (last - first))
    if growth < LEAST_GROWTH:
        return text
    times = f"{growth:.1f}" if growth < 1000 else f"{growth:.2g}"
    return f"{text}; grew {times} times {_each(what)} since {what} {first}"


def _each(what: str) -> str:
    return f"an {what}" if what.startswith("i") else f"a {what}"


def _turn_of_line(flow: DataFlow, place: int, module: str) -> str:
    """The turn of a loop that runs a line many times within one module call."""
    frame = flow.frames[place]
    if frame.source is None or not frame.is_op:
        return ""
    returns = _returns(flow, module)
    begin = max((end + 1 for end in returns if end < place), default=0)
    end = min((end for end in returns if end > place), default=len(flow.frames))
    same = [
        each
        for each in flow.frames[begin:end]
        if (each.name, each.kind, each.source) == (frame.name, frame.kind, frame.source)
    ]
    in_each = _times_in_each(frame, flow.frames[begin:end])
    if not in_each or len(same) // in_each < LEAST_TURNS:
        return ""
    turn, column = divmod(same.index(frame), in_each)
    sizes = [_magnitude(flow, each) for each in same[column::in_each]]
    if not _is_recurrence(flow, same[column : in_each * turn + column + 1 : in_each]):
        sizes = []
    return turn_text(turn, sizes, what="run", where="this line in this call, from 0")


def _times_in_each(frame: FramePlan, frames: Sequence[FramePlan]) -> int:
    """How often a line runs an operation each time that the line runs; 0 if that is not certain.

    Where the line has the operation more than once, what ran between two of its runs has to agree.
    """
    assert frame.source is not None
    code, name = frame.source.code, plain(frame.kind)
    times = times_in(code, name)
    if times < 2:
        return times
    stretches = itertools.groupby(frames, key=lambda each: each.source == frame.source)
    counts = [
        sum((each.name, each.kind) == (frame.name, frame.kind) for each in stretch)
        for is_here, stretch in stretches
        if is_here
    ]
    found = [count for count in counts if count]
    if is_chain(code, name):
        return times if all(count % times == 0 for count in found) else 0
    return times if all(count == times for count in found) else 0


def _turn_of_module(flow: DataFlow, place: int, module: str) -> str:
    """The turn of a loop around the innermost module that is called many times.

    A module that is called as often as the one around it is not the loop's.
    """
    found: tuple[str, list[int]] | None = None
    while module:
        returns = _returns(flow, module)
        if found is not None and len(returns) != len(found[1]):
            break
        if len(returns) >= LEAST_TURNS:
            found = module, returns
        module = module.rpartition(".")[0]
    if found is None:
        return ""
    name, returns = found
    turn = sum(end < place for end in returns)
    calls = [flow.frames[end] for end in returns]
    sizes = [_magnitude(flow, call) for call in calls]
    if not _is_recurrence(flow, calls[: turn + 1]):
        sizes = []
    return turn_text(turn, sizes, what="call", where=f"`{name}` in this forward")


def _is_recurrence(flow: DataFlow, turns: Sequence[FramePlan]) -> bool:
    """Whether what each turn made leads to what the next one made."""
    makers = {value: index for index, step in enumerate(flow.steps) for value in step.outputs}
    return all(_leads_to(flow, makers, *pair) for pair in itertools.pairwise(turns))


def _leads_to(
    flow: DataFlow, makers: Mapping[int, int], before: FramePlan, after: FramePlan
) -> bool:
    reached, wanted = set(_made_by(before)), set(_made_by(after))
    begin = min((makers[value] for value in reached if value in makers), default=0)
    end = max((makers[value] for value in wanted if value in makers), default=len(flow.steps) - 1)
    for step in flow.steps[begin + 1 : end + 1]:
        if not reached.isdisjoint(step.inputs):
            reached.update(step.outputs)
    return not reached.isdisjoint(wanted)


def _made_by(frame: FramePlan) -> list[int]:
    """The values that a frame shows as outputs."""
    return [
        row.value
        for row in frame.rows
        if row.value is not None and RowRole.of(row.label) is RowRole.OUTPUT
    ]


def _returns(flow: DataFlow, module: str) -> list[int]:
    """The frames that show a module, one for each of its calls."""
    return [
        place for place, frame in enumerate(flow.frames) if frame.name == module and not frame.is_op
    ]


def _magnitude(flow: DataFlow, frame: FramePlan) -> float:
    """The largest magnitude of a frame's outputs; NaN if bad or not known."""
    outputs = [flow.ranges[value] for value in _made_by(frame)]
    sizes = [number.abs_max for number in outputs if isinstance(number, Range)]
    return math.nan if any(math.isnan(size) for size in sizes) else max(sizes, default=math.nan)
