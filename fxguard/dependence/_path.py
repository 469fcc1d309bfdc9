"""The path of a leak: from what was replaced to the output that changed."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxguard.dependence._because import Reasons
from fxguard.dependence._change import changed
from fxguard.dependence._places import Places
from fxguard.dependence._recording import Made, Recording
from fxguard.report.dependencies import PathStep

__all__ = ["Leak", "leak_between", "leak_of_length"]

MOST_OTHERS = 3  # more operations that leak, of other lines

# Whether a value is wrong: it changed where nothing should change. None if it cannot be told.
Wrong = Callable[[Made, Made], bool | None]
Leads = Callable[[Made, Made], bool]


@dataclass(frozen=True)
class Leak:
    """The operation that leaks, and the shortest path through it."""

    step: PathStep
    because: str
    path: tuple[PathStep, ...]
    others: tuple[PathStep, ...] = ()


def leak_between(one: Recording, two: Recording, places: Places, reasons: Reasons) -> Leak | str:
    """The leak between two runs, the second of which had other inputs in some places.

    Args:
        one: the run with the model's inputs.
        two: the other one.
        places: where changes belong.
        reasons: what about operations of the first run.

    Returns:
        The leak, or why it was not found.
    """

    def wrong(a: Made, b: Made) -> bool | None:
        found = changed(a.tensor, b.tensor)
        return None if found is None else bool(found.any()) and not places.hold(found)

    def leads(a: Made, b: Made) -> bool:
        found = changed(a.tensor, b.tensor)
        return found is None or bool(found.any())

    return _leak(one, two, wrong, leads, reasons)


def leak_of_length(
    long: Recording,
    short: Recording,
    cut: Callable[[Tensor, Tensor], Tensor | None],
    limit: float,
    reasons: Reasons,
) -> Leak | str:
    """The leak between a run with padding, and one without it.

    Args:
        long: the run with padding.
        short: the one without.
        cut: gives what of a tensor of the long run a tensor of the short one corresponds to.
        limit: the relative change that roundings make.
        reasons: what about operations of the first run.
    """

    def wrong(a: Made, b: Made) -> bool | None:
        part = cut(a.tensor, b.tensor)
        found = None if part is None else changed(part, b.tensor, limit)
        return None if found is None else bool(found.any())

    def leads(a: Made, b: Made) -> bool:
        return a.tensor.shape != b.tensor.shape or wrong(a, b) is not False

    return _leak(long, short, wrong, leads, reasons)


def _leak(
    one: Recording, two: Recording, wrong: Wrong, leads: Leads, reasons: Reasons
) -> Leak | str:
    """The leak, by the values of two runs that are each other's counterparts."""
    values = one.values
    counterpart = _aligned(values, two.values)
    is_wrong: list[bool] = []
    for i, value in enumerate(values):
        other = counterpart.get(i)
        found = None if other is None else wrong(value, other)
        is_wrong.append(any(is_wrong[x] for x in value.reads) if found is None else found)
    ends = [i for i in one.returned if i is not None and is_wrong[i]]
    if not ends:
        return "what leaks is not seen from Python"

    def leads_on(i: int) -> bool:
        other = counterpart.get(i)
        return other is None or leads(values[i], other)

    sources, towards = _first_wrong(values, ends, is_wrong)
    first = min(sources)
    behind = _behind(first, towards)
    before = _to_given(values, first, leads_on)
    reason = reasons.of([first, *behind])
    own = {_line(reason.step), *(_line(s) for i in behind[:1] if (s := values[i].step))}
    others = dict[object, PathStep]()
    for i in sorted(sources):
        step = values[i].step
        if step is not None and _line(step) not in own and i != first:
            others.setdefault(_line(step), step)
    path = _steps(values, [*before, *behind])
    return Leak(reason.step, reason.text, path, tuple(others.values())[:MOST_OTHERS])


def _aligned(one: Sequence[Made], two: Sequence[Made]) -> dict[int, Made]:
    """The counterpart of each value, by its index; those of another way have none."""
    a, b = ([(x.step, x.given, x.kept) for x in each] for each in (one, two))
    if a == b:
        return dict(enumerate(two))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return {x.a + i: two[x.b + i] for x in blocks for i in range(x.size)}


def _first_wrong(
    values: Sequence[Made], ends: Sequence[int], is_wrong: Sequence[bool]
) -> tuple[list[int], dict[int, int | None]]:
    """The values that are wrong although nothing that they read is.

    Returns:
        They, and from each value the next one towards the output.
    """
    towards: dict[int, int | None] = dict.fromkeys(ends)
    todo, found = deque(ends), list[int]()
    while todo:
        at = todo.popleft()
        more = [i for i in values[at].reads if is_wrong[i]]
        if not more and values[at].step is not None:
            found.append(at)
        for each in more:
            if each not in towards:
                towards[each] = at
                todo.append(each)
    return found or [ends[0]], towards


def _behind(first: int, towards: dict[int, int | None]) -> list[int]:
    way, at = list[int](), towards[first]
    while at is not None:
        way.append(at)
        at = towards[at]
    return way


def _to_given(values: Sequence[Made], end: int, leads: Callable[[int], bool]) -> list[int]:
    """The shortest way from something that the model was given to a value."""
    towards: dict[int, int | None] = {end: None}
    todo = deque([end])
    while todo:
        at = todo.popleft()
        if values[at].given:
            way, here = list[int](), at
            while here != end:
                way.append(here)
                after = towards[here]
                assert after is not None
                here = after
            return [*way, end]
        for each in values[at].reads:
            if each not in towards and leads(each):
                towards[each] = at
                todo.append(each)
    return [end]


def _steps(values: Sequence[Made], way: Sequence[int]) -> tuple[PathStep, ...]:
    found = list[PathStep]()
    for i in way:
        value = values[i]
        step = PathStep(f"input {value.given}") if value.given else value.step
        if step is not None and (not found or found[-1] != step):
            found.append(step)
    return tuple(found)


def _line(step: PathStep) -> object:
    return step.title if step.source is None else step.source.position
