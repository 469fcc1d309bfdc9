"""The contents of a bad value and the numbers inside one operation, from a second run."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph import higher_order
from fxguard.measure import traceable
from fxguard.measure.details import Detail, describe
from fxguard.plan.plan import Check
from fxguard.records import Range, Role, Severity
from fxguard.rerun.at_checks import AtChecks
from fxguard.rerun.repeats import same_magnitude
from fxguard.rerun.start import Start, look_through
from fxguard.rerun.walk import Ended, Walk

__all__ = ["DetailOf", "detail_of", "numbers_inside"]


def detail_of(run: GraphRun, value: int) -> Detail | None:
    """The non-finite elements of a value of a graph.

    Returns:
        None if the second run did not repeat the numbers of the first, as under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten. Also None if an
        earlier second run failed to repeat them, because a third one would see another tensor.
    """
    look = DetailOf.of(run, value)
    if look is not None:
        look_through(run, look)
    return None if look is None else look.detail


class DetailOf(AtChecks):
    """Counts the non-finite elements of one value; in a loop, of its first bad iteration.

    Earlier numbers are compared with those of the first run.

    Attributes:
        detail: None as for :func:`detail_of`.
        has_ended: whether nothing more can be seen.
    """

    @classmethod
    def of(cls, run: GraphRun, value: int) -> DetailOf | None:
        """The look at a value of a graph; None if nothing can be seen of it.

        One step represents all operations of a graph that could not run again.
        """
        wanted, later = run.plan.values[value].slot, run.plan.values[value].later
        if later is not None:  # only a second run sees it, so there is nothing to compare
            return cls(run, -1, [(-1, run.plan.later[later])])
        checks = list(enumerate(run.plan.checks))
        return None if wanted not in dict(checks) else cls(run, wanted or 0, checks)

    def __init__(self, run: GraphRun, wanted: int, checks: list[tuple[int, Check]]) -> None:
        super().__init__(checks, self.look)
        self.wanted = wanted
        self.name = dict(checks)[wanted].node
        self.expected = run.statistics.tolist()
        # Neither integers nor inputs: a cache that the graph wrote has changed.
        self.compared = {v.slot for v in run.plan.values if v.can_be_bad and v.role is Role.MADE}
        self.magnitudes: list[float] = []  # of the iterations before
        self.iterations: dict[str, Any] = {}
        self.detail: Detail | None = None
        self.has_ended = False

    def look(self, walk: Walk, slot: int, value: Any) -> None:
        """Look at the value of a check."""
        if slot == self.wanted:
            detail = describe(value)
            self.look_at_iteration(walk, detail)
            same = slot < 0 or detail.severity == Severity.of(self.expected[slot][1])
            if same or not walk.repeats:
                self.end(replace(detail, **self.iterations) if same else None)
        elif slot in self.compared and not walk.repeats:
            high = float(traceable.abs_min_max(value)[1])
            if not same_magnitude(high, self.expected[slot][1]):
                self.end(None)

    def look_at_iteration(self, walk: Walk, detail: Detail) -> None:
        """Note in which iteration it turned bad, and how it grew until then."""
        if not walk.iteration:
            self.magnitudes.clear()  # the loop around it has begun a new iteration
        if detail.severity is not Severity.FINITE and not self.iterations:
            grows = _is_recurrence(walk, self.name)
            self.iterations = {
                "loop": walk.loop,
                "iteration": walk.iteration,
                "magnitudes": tuple(self.magnitudes) if grows else (),
            }
        self.magnitudes.append(detail.largest_finite or 0.0)

    def end(self, detail: Detail | None) -> None:
        """Look no further."""
        self.detail, self.has_ended = detail, True
        raise Ended


def _is_recurrence(walk: Walk, name: str) -> bool:
    """Whether a value of a body leads to the same value in the next iteration."""
    every: list[Node] = list(walk.module.graph.nodes)  # type: ignore[union-attr,arg-type]
    node = next((each for each in every if each.name == name), None)
    inputs = [each for each in every if each.op == "placeholder"]
    output = next(each for each in every if each.op == "output")
    results: Any = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    passed = [*zip(results[: _carried_by(walk)], inputs, strict=False)]
    todo, seen = [node] if node is not None else [], set[Node]()
    while todo:
        at = todo.pop()
        following = [*at.users, *(taken for result, taken in passed if result is at)]
        if node in following:
            return True
        todo += [each for each in following if each not in seen]
        seen.update(following)
    return False


def _carried_by(walk: Walk) -> int:
    """How many values the loop right around a body passes from one iteration to the next."""
    if walk.outer is None or walk.outer.node is None:
        return 0
    node, (_, position) = walk.outer.node, walk.inside[-1]
    kind = higher_order.kind_of(node)
    with contextlib.suppress(LookupError, TypeError, ValueError):
        module: Any = walk.outer.module
        bodies = kind.bodies(node, module) if kind and kind.runs_many_times else ()
        return next((body.carried for body in bodies if body.position == position), 0)
    return 0


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
    except Exception:  # then the operation around them is blamed
        return {}
    return ranges
