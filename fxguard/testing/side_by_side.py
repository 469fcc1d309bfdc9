"""One run of a graph in two precisions, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.nodes import elements_of
from fxguard.graph.wide_form import Ran, is_float, widened
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Check, Place, Step
from fxguard.records import Source
from fxguard.rerun.differences import relative_error
from fxguard.rerun.lockstep import Lockstep
from fxguard.rerun.same_start import copies_of
from fxguard.rerun.wide_run import WideForm

__all__ = ["Deviation", "SideBySide", "converted"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far what an operation made is from the same in the reference."""

    title: str  # "encoder.block.0 mul"
    error: float  # largest difference, relative to the largest magnitude of the reference
    error_before: float  # the largest of what it read
    source: Source | None = None

    def __str__(self) -> str:
        where = f" ({self.source.place})" if self.source else ""
        made = f"an error of {self.error:.2g}" if self.error < math.inf else "an inf or a NaN"
        return f"{self.title}{where} made {made} out of {self.error_before:.2g}"


def converted(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(dtype) if is_float(x) else x, values
    )


class SideBySide(WideForm):
    """One run of a graph, once more in two precisions, in step.

    Args:
        run: that has returned.
        reference: the other precision.

    Attributes:
        deviations: of each operation, in order.
        not_compared: operations that draw random numbers, or have no kernel for the reference.
        without_kernel: how many of them have none.
    """

    def __init__(self, run: GraphRun, reference: torch.dtype) -> None:
        super().__init__(reference)
        self.run_before = run
        self.errors: dict[Node, float] = {}
        self.deviations: list[Deviation] = []
        self.random: set[Place] = set()
        # What is measured after a node has run, and the operation that made it.
        self.ends: dict[Place, list[tuple[Step, list[Check]]]] = {}
        for step in run.plan.steps:
            if not step.counts:
                continue
            slots = [run.plan.values[value].slot for value in step.outputs]
            checks = [run.plan.checks[slot] for slot in slots if slot is not None]
            if checks and not checks[0].inside:
                self.ends.setdefault(checks[0].place, []).append((step, checks))

    def run(self, references: Sequence[Any]) -> Sequence[Any]:
        """Run it, and return what leaves it in the reference."""
        if self.run_before.random_state is not None:
            self.run_before.random_state.restore()
        given = copies_of(self.run_before)
        others = [
            other.clone() if is_float(low) else low
            for low, other in zip(given, references, strict=True)
        ]
        step = Lockstep(without_marks(self.run_before.graph_module), self)
        _, returned = step.run_both(given, others)
        return list(widened(returned, self.dtype))

    @property
    def not_compared(self) -> int:
        """How many operations were taken over from the run in the other precision."""
        return len(self.taken_over) + len(self.random)

    @property
    def without_kernel(self) -> int:
        """How many of those have no kernel for the reference."""
        return sum(reason.startswith("no ") for reason in self.taken_over.values())

    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        return True

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if ran.before is not None:
            self.random.add(step.place(node))
        return super().follow(step, node, ran, args, kwargs)

    def after(self, step: Lockstep, node: Node, args: Any, kwargs: Any) -> None:
        """Note how far apart the two results of a node are."""
        if step.inside:
            return
        before = max((self.error(step, one) for one in node.all_input_nodes), default=0.0)
        self.errors.pop(node, None)
        self.error(step, node)
        place = step.place(node)
        if place in self.taken_over or place in self.random:
            return
        nodes = {each.name: each for each in step.env}
        for operation, checks in self.ends.get(place, ()):
            error = 0.0
            for check in checks:
                made = nodes[check.node]  # another node, where its memory was written
                self.errors.pop(made, None)
                error = max(error, self.error(step, made))
            self.deviations.append(Deviation(operation.title, error, before, operation.source))

    def error(self, step: Lockstep, node: Node) -> float:
        """How far apart the two forms of a node's result are."""
        if node not in self.errors:
            low = step.env[node]
            self.errors[node] = _largest_error(low, step.others.get(node, low))
        return self.errors[node]


def _largest_error(low: Any, high: Any) -> float:
    pairs = zip(elements_of(low), elements_of(high), strict=True)
    return max((relative_error(one, other) for (_, one), (_, other) in pairs), default=0.0)
