"""Runs a graph in two precisions, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.nodes import elements_of
from fxguard.graph.wide_form import Ran, widened
from fxguard.plan.plan import Check, Place, Step
from fxguard.records import Source
from fxguard.rerun.differences import relative_error
from fxguard.rerun.start import Start
from fxguard.rerun.walk import SecondForm, Walk
from fxguard.rerun.wide_run import WideForm
from fxguard.source.lines import source_of_trace
from fxguard.testing._both_gradients import BackwardOfBoth, BothGradients
from fxguard.testing._two_backwards import TwoBackwards

__all__ = ["Deviation", "SideBySide"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the results of an operation are from those in the reference."""

    title: str  # "encoder.block.0 mul"
    error: float  # largest difference, relative to the largest magnitude of the reference
    error_before: float  # the largest error of its operands
    source: Source | None = None
    phase: Literal["forward", "backward"] = "forward"

    def __str__(self) -> str:
        title = self.title + " (backward)" * (self.phase == "backward")
        where = f" ({self.source.place})" if self.source else ""
        made = f"an error of {self.error:.2g}" if self.error < math.inf else "an inf or a NaN"
        return f"{title}{where} made {made} out of {self.error_before:.2g}"


class SideBySide(WideForm):
    """Repeats one run of a graph in two precisions, in step.

    Args:
        run: a run that has returned.
        reference: the other precision.
        gradients: where the hooks of its backward note what they see, if there is to be a backward.

    Attributes:
        deviations: deviation of each operation, in order.
    """

    def __init__(
        self, run: GraphRun, reference: torch.dtype, gradients: BothGradients | None = None
    ) -> None:
        super().__init__(reference, differentiable=gradients is not None)
        self.run_before = run
        self.gradients = gradients
        self.errors: dict[Node, float] = {}
        self.operations: list[BackwardOfBoth] = []  # may have a backward, in forward order
        self.found: dict[tuple[Place, int], Deviation] = {}  # deviations of operations, in order
        self.random: set[Place] = set()
        self.steps = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
        # An operation with bodies to the first step in one of them.
        self.bodies: dict[Place, Step] = {}
        for step in self.steps.values():
            if step.inside:
                self.bodies.setdefault((step.inside[:-1], step.inside[-1][0]), step)
        # A node to what is measured after it has run, with the operation that made it.
        self.ends: dict[Place, list[tuple[Step, list[Check]]]] = {}
        for step in self.steps.values():
            slots = [run.plan.values[value].slot for value in step.outputs]
            checks = [run.plan.checks[slot] for slot in slots if slot is not None]
            if checks:
                self.ends.setdefault(checks[0].place, []).append((step, checks))

    def run(self, given: Sequence[Any], references: Sequence[Any]) -> tuple[Any, Any]:
        """Run the graph in both precisions.

        Args:
            given: its arguments in the model's precision; the graph may write them.
            references: the same arguments in the reference.

        Returns:
            Its outputs in both precisions.
        """
        if self.run_before.random_state is not None:
            self.run_before.random_state.restore()
        form: SecondForm = self
        if self.gradients is not None:
            form = TwoBackwards(self, self.gradients, self.operations)
        low, wide = Start(self.run_before).walk(given, form, others=references)
        return low, widened(wide, self.dtype, differentiable=self.differentiable)

    @property
    def deviations(self) -> list[Deviation]:
        """The deviations of all operations, in order."""
        return list(self.found.values())

    @property
    def deviations_of_backward(self) -> list[Deviation]:
        """The deviations of the backward of all operations, in the order of the backward."""
        found: dict[Place, Deviation] = {}
        for one in reversed(self.operations):
            step = self.steps.get(one.place)
            if step is None or one.error is None or self.is_taken_over(one.place):
                continue
            title, source = step.title, step.source
            deviation = Deviation(title, one.error, one.error_before, source, "backward")
            known = found.get(one.place, deviation)
            found[one.place] = max(known, deviation, key=lambda each: each.error)
        return list(found.values())

    @property
    def without_gradient(self) -> int:
        """The number of differentiable operations whose backward was not compared."""
        left = {one.place for one in self.operations if one.is_differentiable}
        seen = {one.place for one in self.operations if one.error is not None}
        return sum(place in self.steps for place in left - seen)

    def is_taken_over(self, place: Place) -> bool:
        """Whether an operation was not compared."""
        return place in self.taken_over or place in self.random

    @property
    def not_compared(self) -> int:
        """How many operations took over the result of the run in the other precision."""
        return len(self.taken_over) + len(self.random)

    @property
    def without_kernel(self) -> int:
        """How many of those draw no random numbers, but have no kernel for the reference."""
        return sum("random" not in reason for reason in self.taken_over.values())

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if ran.before is not None:
            self.random.add(walk.place(node))
        return super().follow(walk, node, ran, args, kwargs)

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        """Note how far apart the two results of a node are."""
        before = max((self.error(walk, one) for one in node.all_input_nodes), default=0.0)
        self.errors.pop(node, None)
        self.error(walk, node)
        place = walk.place(node)
        if self.is_taken_over(place):
            return
        nodes = {each.name: each for each in walk.env}
        for number, (operation, checks) in enumerate(self.ends.get(place, ())):
            made = [nodes[check.node] for check in checks]  # not the same if written since
            for other in made:
                self.errors.pop(other, None)
            error = max(self.error(walk, other) for other in made)
            self.note((place, number), operation, error, before)
        if place in self.bodies and place not in self.steps:
            self.steps[place] = whole = replace(
                self.bodies[place],
                kind=walk.call_of(node).kind,
                source=source_of_trace(node.meta.get("stack_trace")),
            )
            self.note((place, 0), whole, self.error(walk, node), before)

    def note(self, key: tuple[Place, int], operation: Step, error: float, before: float) -> None:
        """Add the error of what an operation made, possibly in another turn of a loop."""
        one = Deviation(operation.title, error, before, operation.source)
        self.found[key] = max(self.found.get(key, one), one, key=lambda each: each.error)

    def error(self, walk: Walk, node: Node) -> float:
        """How far apart the two forms of a node's result are."""
        if node not in self.errors:
            low = walk.env[node]
            self.errors[node] = _largest_error(low, walk.others.get(node, low))
        return self.errors[node]


def _largest_error(low: Any, high: Any) -> float:
    pairs = zip(elements_of(low), elements_of(high), strict=True)
    return max((relative_error(one, other) for (_, one), (_, other) in pairs), default=0.0)
