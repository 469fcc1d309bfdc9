"""What is known of a call that was one run of a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, ModuleReturn
from fxguard.graph import marks
from fxguard.graph.nodes import memory_of
from fxguard.plan.plan import Plan

__all__ = ["KnownCall", "is_one_run"]


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
        cls,
        run: GraphRun,
        outputs: Sequence[Any],
        batch: Batch,
        frames: int,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> KnownCall | None:
        """What there is to know of such a call when it has returned.

        Args:
            run: the run.
            outputs: what it returned.
            batch: the batch, which is not closed yet.
            frames: how many frames that has.
            args: the arguments of the model.
            kwargs: likewise.
            output: what the model returned.

        Returns:
            None if its graph does more than compute outputs from inputs.
        """
        if run.plan.written or run.inputs or run.derived or run.calls:
            return None
        labels, tensors = marks.flatten_call(args, kwargs, output)
        positions = {id(x): position for position, x in enumerate(_inside(run, outputs))}
        places = tuple([positions.get(id(tensor), -1) for tensor in tensors])
        if -1 in places:
            return None
        returned = batch.events[1]
        assert isinstance(returned, ModuleReturn)
        return cls(run.plan, labels, places, returned, frames)

    def is_repeated_by(
        self, run: GraphRun, outputs: Sequence[Any], args: Any, kwargs: Any, output: Any
    ) -> bool:
        """Whether a call with one run of its graph was the same once more, and healthy."""
        run.read()
        if not run.is_finite() or not _are_apart(run):
            return False
        labels, tensors = marks.flatten_call(args, kwargs, output)
        inside = _inside(run, outputs)
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
