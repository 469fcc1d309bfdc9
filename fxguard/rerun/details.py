"""The contents of a bad value and the numbers inside one operation, from a second run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.forgiving import theirs
from fxguard.measure import traceable
from fxguard.measure.details import Detail, describe
from fxguard.plan.plan import Check, Place
from fxguard.records import Range, Severity
from fxguard.rerun.at_checks import AtChecks
from fxguard.rerun.differences import comparable, same_magnitude
from fxguard.rerun.start import Start, look_through
from fxguard.rerun.walk import Ended, Walk

__all__ = ["Details", "detail_of", "numbers_inside"]


def detail_of(run: GraphRun, value: int) -> Detail | None:
    """The non-finite elements of a value of a graph.

    Returns:
        None if the second run did not repeat the numbers of the first, as under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten. Also None if an
        earlier second run failed to repeat them, because a third one would see another tensor.
    """
    look = Details(run, [value])
    if look.wanted:
        look_through(run, look)
    return look.found.get(value)


class Details(AtChecks):
    """Counts the non-finite elements of some values; in a loop, of the first bad iteration.

    Numbers on the way are compared with those of the first run. A value that only a second run
    sees has none.

    Args:
        run: the first run.
        values: values of its plan. One step represents all operations of a graph that could not
            run again, and has no details.

    Attributes:
        wanted: the values that are still to come, by number of their check.
        found: the details of values, up to where a number is not repeated.
    """

    def __init__(self, run: GraphRun, values: Iterable[int]) -> None:
        plan = run.plan
        slots = {slot: v for v in values if (slot := plan.values[v].slot) is not None}
        laters = {~later: v for v in values if (later := plan.values[v].later) is not None}
        checks = dict(enumerate(plan.checks)) if slots else {}
        checks |= {slot: plan.later[~slot] for slot in laters}
        self.wanted = {slot: v for slot, v in (slots | laters).items() if slot in checks}
        super().__init__(checks.items(), self.look)
        self.places = {_end_of(checks[slot]) for slot in self.wanted}
        self.names = {slot: check.node for slot, check in checks.items()}
        self.expected = run.statistics.tolist()
        self.compared = comparable(plan)
        self.grown: dict[int, _Grown] = {slot: _Grown() for slot in self.wanted}
        self.found: dict[int, Detail] = {}

    @property
    def last_places(self) -> Collection[Place]:
        return self.places

    def look(self, walk: Walk, slot: int, value: Any) -> None:
        """Look at the value of a check."""
        if slot in self.wanted:
            detail = describe(value)
            self.grown[slot].note(walk, self.names[slot], detail)
            if slot < 0 or detail.severity == Severity.of(self.expected[slot][1]):
                found = self.wanted.pop(slot)
                self.found[found] = replace(detail, **self.grown[slot].iterations)
            elif not walk.repeats:
                raise Ended
        elif slot in self.compared and not walk.repeats:
            high = float(traceable.abs_min_max(value)[1])
            if not same_magnitude(high, self.expected[slot][1]):
                raise Ended
        if not self.wanted:
            raise Ended


def _end_of(check: Check) -> Place:
    """The place after which the number of a check is known."""
    return check.place if check.region_end is None else (check.inside, check.region_end)


class _Grown:
    """In which iteration of a loop a value turned bad, and how it grew until then."""

    def __init__(self) -> None:
        self.iterations: dict[str, Any] = {}
        self.magnitudes: list[float] = []  # of the iterations before

    def note(self, walk: Walk, name: str, detail: Detail) -> None:
        """Note the value of one iteration."""
        if not walk.iteration:
            self.magnitudes.clear()  # the loop around it has begun a new iteration
        if detail.severity is not Severity.FINITE and not self.iterations:
            grows = _is_recurrence(walk, name)
            self.iterations = {
                "loop": walk.loop,
                "iteration": walk.iteration,
                "magnitudes": tuple(self.magnitudes) if grows else (),
            }
        self.magnitudes.append(detail.largest_finite or 0.0)


def _is_recurrence(walk: Walk, name: str) -> bool:
    """Whether a value of a body leads to the same value in the next iteration."""
    every: list[Node] = list(walk.module.graph.nodes)  # type: ignore[union-attr,arg-type]
    node = next((each for each in every if each.name == name), None)
    inputs = [each for each in every if each.op == "placeholder"]
    output = next(each for each in every if each.op == "output")
    results: Any = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    passed = [*zip(results[: walk.carried], inputs, strict=False)]
    todo, seen = [node] if node is not None else [], set[Node]()
    while todo:
        at = todo.pop()
        following = [*at.users, *(taken for result, taken in passed if result is at)]
        if node in following:
            return True
        todo += [each for each in following if each not in seen]
        seen.update(following)
    return False


def numbers_inside(run: GraphRun) -> dict[int, Range | str]:
    """The ranges of values that only a second run can see, if the first run turned bad.

    Returns:
        Value of the plan to its range; empty if the run is healthy, or no second run is possible.
    """
    values = {value.later: i for i, value in enumerate(run.plan.values) if value.later is not None}
    if not values or bool(torch.isfinite(run.statistics).all()):
        return {}
    ranges: dict[int, Range | str] = {}

    def visit(walk: Walk, later: int, value: Any) -> None:
        low, high = traceable.abs_min_max(value)
        ranges[values[later]] = traceable.decode(float(low), float(high))

    try:
        Start(run, to_the_end=False).again(AtChecks(enumerate(run.plan.later), visit))
    except theirs():  # then the operation around them is blamed
        return {}
    return ranges
