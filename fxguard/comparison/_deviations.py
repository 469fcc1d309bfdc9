"""How far each operation of a graph is from its wide form, as both run side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.comparison._both_edges import BackwardOfBoth
from fxguard.comparison.elements import Deviation
from fxguard.graph.nodes import elements_of
from fxguard.graph.wide_form import Ran
from fxguard.plan.plan import Check, Place, Step
from fxguard.rerun.differences import relative_error
from fxguard.rerun.walk import Walk, Watcher
from fxguard.rerun.wide_run import WideForm
from fxguard.source.lines import source_of_trace

__all__ = ["Deviations"]


class Deviations(Watcher):
    """Measures every operation of one run, when it has run in both forms.

    Args:
        run: the run that is repeated.
        form: the wide form.
    """

    def __init__(self, run: GraphRun, form: WideForm) -> None:
        self.form = form
        self._errors: dict[Node, float] = {}
        self._found: dict[tuple[Place, int], Deviation] = {}  # of operations, in order
        self._random: set[Place] = set()
        self._steps = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
        # An operation with bodies to the first step in one of them.
        self._bodies: dict[Place, Step] = {}
        for step in self._steps.values():
            if step.inside:
                self._bodies.setdefault((step.inside[:-1], step.inside[-1][0]), step)
        # A node to what is measured after it has run, with the operation that made it.
        self._ends: dict[Place, list[tuple[Step, list[Check]]]] = {}
        for step in self._steps.values():
            slots = [run.plan.values[value].slot for value in step.outputs]
            checks = [run.plan.checks[slot] for slot in slots if slot is not None]
            if checks:
                self._ends.setdefault(checks[0].place, []).append((step, checks))

    @property
    def of_forward(self) -> list[Deviation]:
        """The deviations of all operations, in order."""
        return list(self._found.values())

    def of_backward(self, operations: Iterable[BackwardOfBoth]) -> list[Deviation]:
        """The deviations of the backward of all operations, in the order of the backward.

        Args:
            operations: the operations that ran, in the order of the forward.
        """
        found: dict[Place, Deviation] = {}
        for one in reversed(list(operations)):
            step = self._steps.get(one.place)
            if step is None or one.error is None or self._is_taken_over(one.place):
                continue
            title, source = step.title, step.source
            deviation = Deviation(title, one.error, one.error_before, source, "backward")
            known = found.get(one.place, deviation)
            found[one.place] = max(known, deviation, key=lambda each: each.error)
        return list(found.values())

    def without_gradient(self, operations: Iterable[BackwardOfBoth]) -> int:
        """The number of differentiable operations whose backward was not compared."""
        left = {one.place for one in operations if one.is_differentiable}
        seen = {one.place for one in operations if one.error is not None}
        return sum(place in self._steps for place in left - seen)

    @property
    def taken_over(self) -> int:
        """How many operations took over the model's result."""
        return len(self.form.taken_over) + len(self._random)

    @property
    def without_kernel(self) -> int:
        """How many of those draw no random numbers, but have no wide kernel."""
        return sum("random" not in reason for reason in self.form.taken_over.values())

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        """Note how far apart the two results of a node are."""
        place = walk.place(node)
        if ran.before is not None:
            self._random.add(place)
        before = max((self._error(walk, one) for one in node.all_input_nodes), default=0.0)
        self._errors.pop(node, None)
        self._error(walk, node)
        if self._is_taken_over(place):
            return
        nodes = {each.name: each for each in walk.env}
        for number, (operation, checks) in enumerate(self._ends.get(place, ())):
            made = [nodes[check.node] for check in checks]  # not the same if written since
            for other in made:
                self._errors.pop(other, None)
            error = max(self._error(walk, other) for other in made)
            self._note((place, number), operation, error, before)
        if place in self._bodies and place not in self._steps:
            self._steps[place] = whole = replace(
                self._bodies[place],
                kind=walk.call_of(node).kind,
                source=source_of_trace(node.meta.get("stack_trace")),
            )
            self._note((place, 0), whole, self._error(walk, node), before)

    def _is_taken_over(self, place: Place) -> bool:
        return place in self.form.taken_over or place in self._random

    def _note(self, key: tuple[Place, int], operation: Step, error: float, before: float) -> None:
        """Add the error of what an operation made, possibly in another turn of a loop."""
        one = Deviation(operation.title, error, before, operation.source)
        self._found[key] = max(self._found.get(key, one), one, key=lambda each: each.error)

    def _error(self, walk: Walk, node: Node) -> float:
        """How far apart the two forms of a node's result are."""
        if node not in self._errors:
            low = walk.env[node]
            self._errors[node] = _largest_error(low, walk.others.get(node, low))
        return self._errors[node]


def _largest_error(low: Any, high: Any) -> float:
    pairs = zip(elements_of(low), elements_of(high), strict=True)
    return max((relative_error(one, other) for (_, one), (_, other) in pairs), default=0.0)
