"""Calls of a model that is captured whole: most of them do what an earlier call did.

TorchDynamo is off beside what it has captured, so such a call is one run of a graph. If the run is
healthy, and the same tensors enter and leave as before, little has to be written down. A batch
begins as soon as there is more: another graph, an operation between graphs, an exception, a bad
number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard.batch.active import ActiveForward
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, ModuleReturn
from fxguard.graph import marks
from fxguard.graph.nodes import memory_of
from fxguard.plan.plan import Plan

__all__ = ["CapturedCall", "KnownCall", "is_one_run"]


@dataclass(slots=True, eq=False)
class CapturedCall:
    """A call that is running: see :class:`fxguard.batch.active.Call`.

    Attributes:
        guard: of the model.
        run: the run of its graph, and what it returned; None before.
        forward: the forward that has begun, because there is more to note; None if it has not.
    """

    guard: object
    begin: Callable[[], ActiveForward]  # begins the forward
    add: Callable[[Batch, GraphRun, Sequence[Any] | None], None]  # adds a run to a batch
    run: GraphRun | None = None
    outputs: Sequence[Any] = ()
    forward: ActiveForward | None = None

    def is_of(self, guard: object) -> bool:
        return guard is self.guard

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        if self.run is None and self.forward is None and outputs is not None:
            self.run, self.outputs = run, outputs
        else:
            self.add(self.as_forward().batch, run, outputs)

    def as_forward(self) -> ActiveForward:
        if self.forward is None:
            self.forward = self.begin()
            if self.run is not None:
                self.add(self.forward.batch, self.run, self.outputs)
        return self.forward


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call that was one run of a graph.

    Attributes:
        plan: of the graph.
        labels: of the rows of the model's frame.
        places: of the tensors in these rows, among the inputs and outputs of the graph.
        returned: the return of the model.
        frames: how many frames its batch has.
    """

    plan: Plan
    labels: tuple[str, ...]
    places: tuple[int, ...]
    returned: ModuleReturn
    frames: int

    @classmethod
    def of(
        cls, call: CapturedCall, batch: Batch, frames: int, args: Any, kwargs: Any, output: Any
    ) -> KnownCall | None:
        """What was known of a call when it had returned; None if it was more than one run.

        Args:
            call: the call.
            batch: its batch, which is not closed yet.
            frames: how many frames that has.
            args: the arguments of the model.
            kwargs: likewise.
            output: what the model returned.
        """
        run = call.run
        if run is None or not is_one_run(batch):
            return None
        if run.plan.written or run.inputs or run.derived or run.calls:
            return None
        labels, tensors = marks.flatten_call(args, kwargs, output)
        positions = {id(x): position for position, x in enumerate(_inside(run, call.outputs))}
        places = tuple([positions.get(id(tensor), -1) for tensor in tensors])
        if -1 in places:
            return None
        returned = batch.events[1]
        assert isinstance(returned, ModuleReturn)
        return cls(run.plan, labels, places, returned, frames)

    def is_repeated_by(self, call: CapturedCall, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a call was the same once more, and healthy."""
        run = call.run
        assert run is not None
        run.read()
        if not run.is_finite() or not _are_apart(run):
            return False
        labels, tensors = marks.flatten_call(args, kwargs, output)
        inside = _inside(run, call.outputs)
        known = [inside[place] for place in self.places]
        return labels == self.labels and all(map(operator.is_, tensors, known))


def is_one_run(batch: Batch) -> bool:
    """Whether nothing happened in a batch but one run of a graph, and the return of the model."""
    return len(batch.events) == 2 and len(batch.runs) == 1 and not batch.values


def _inside(run: GraphRun, outputs: Sequence[Any]) -> list[Any]:
    """The inputs and the outputs of a graph."""
    assert run.args is not None
    inputs = [run.args[position] for position, _ in run.plan.inputs]
    return inputs + list(outputs)


def _are_apart(run: GraphRun) -> bool:
    """Whether no two inputs of a graph share their memory."""
    inputs = run.plan.inputs
    if len(inputs) < 2:
        return True
    assert run.args is not None
    tensors = [x for position, _ in inputs if isinstance(x := run.args[position], Tensor)]
    return len(set(map(memory_of, tensors))) == len(tensors)
