"""Graphs that run without checks in most batches: only their outputs are measured there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule

from fxguard.batch.events import Postponed
from fxguard.capture import dynamo
from fxguard.forgiving import theirs
from fxguard.measure import eager, native
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.func_levels import without_levels
from fxguard.measure.ways import EAGER, Way
from fxguard.plan.plan import Plan
from fxguard.torch_names import top_saved_tensor_hooks

__all__ = ["Unchecked"]


class Unchecked:
    """A graph that runs without checks, except in full batches.

    Args:
        plan: its plan.
        way: how its values would be measured under its backend.
        checked: makes the graph with checks.
        compile_graph: the backend, which compiles that graph.
        compile_checked: makes that graph and compiles it as the one without checks was compiled.
    """

    def __init__(
        self,
        plan: Plan,
        way: Way,
        checked: Callable[[Way], GraphModule],
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
        compile_checked: Callable[[list[Any]], Callable[..., Any]],
    ) -> None:
        self.way = way
        self.checked = checked
        self.compile_graph = compile_graph
        self.compile_checked = compile_checked
        self._in_full: Callable[..., Any] | None = None
        self._fails = False  # whether the graph with checks cannot be compiled
        self._lock = threading.Lock()
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

    def prepare(self, args: Sequence[Any]) -> None:
        """Compile the graph with checks for arguments like these, unless that has been tried."""
        with self._lock:
            if self._in_full is None and not self._fails:
                try:
                    self._in_full = self.compile_checked(list(args))
                except theirs():  # a compiler that has compiled the same graph without checks
                    self._fails = True

    def in_full(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph with checks, to run in place of the other one; compiled when first needed.

        Returns:
            None if only a second run can check it: because it cannot be compiled, or because
            activation checkpointing may run it again, which must save the same tensors then.
        """
        if self.way.is_traceable and top_saved_tensor_hooks(False) is not None:
            return None
        if self._in_full is None and not self._fails:
            dynamo.compiling(self.prepare, args)
        return self._in_full

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
