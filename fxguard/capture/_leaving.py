"""Graphs that run without checks: only their outputs are measured, until one turns bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule

from fxguard.batch.events import Postponed
from fxguard.measure import eager, native
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.func_levels import without_levels
from fxguard.measure.ways import EAGER, Way
from fxguard.plan.plan import Plan

__all__ = ["Unchecked"]


class Unchecked:
    """A graph that runs without checks.

    Args:
        plan: its plan.
        way: how its values would be measured under its backend.
        checked: makes the graph with checks.
        compile_graph: the backend, which compiles that graph.
    """

    def __init__(
        self,
        plan: Plan,
        way: Way,
        checked: Callable[[Way], GraphModule],
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
    ) -> None:
        self.way = way
        self.checked = checked
        self.compile_graph = compile_graph
        self.leaving = leaving_of(plan)
        self.values = tuple(value for _, value in self.leaving)
        written = {position for position, _ in plan.written}
        not_copied = written.difference(plan.overwritten)
        entered = (*plan.inputs, *plan.buffers)
        self.overwritten = tuple(value for position, value in entered if position in not_copied)

    def measure(self, outputs: Sequence[Any]) -> Postponed:
        """The postponed statistics of a run that returned these outputs."""
        numbers = [range_inside(outputs[position]) for position, _ in self.leaving]
        return Postponed(self.values, numbers, self.checked_forms, self.overwritten)

    def checked_forms(self) -> Iterator[Callable[..., Any]]:
        """The graph with checks: compiled by its own backend, then uncompiled."""
        if self.way.is_traceable:
            checked = self.checked(self.way)
            yield lambda *args: self.compile_graph(checked, list(args))(*args)
        yield self.checked(EAGER)


@native.reading_or
def range_inside(value: Any) -> eager.Pair:
    """The smallest and the largest magnitude in a value inside all levels of ``torch.func``."""
    with own_arithmetic():
        return eager.abs_min_max(without_levels(value))


def leaving_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The outputs of a graph that can be bad: (position among the outputs, value)."""
    found: dict[int, int] = {}
    for position, value in enumerate(plan.outputs):
        if value is not None and plan.values[value].can_be_bad:
            found.setdefault(value, position)
    return tuple((position, value) for value, position in found.items())
