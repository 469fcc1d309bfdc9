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
        places: of the tensors in these rows: the position of an argument of the graph, or the
            bitwise inverse of that of an output.
        given: how many arguments the model was given by position, and the names of the others, if
            each of them and what the model returned is a tensor; else None.
        returned: the return of the model.
        frames: how many frames its batch has.
    """

    plan: Plan
    labels: tuple[str, ...]
    places: tuple[int, ...]
    given: tuple[int, tuple[str, ...]] | None
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
        assert run.args is not None
        positions = {id(run.args[position]): position for position, _ in run.plan.inputs}
        positions |= {id(x): ~position for position, x in enumerate(outputs)}
        if any(id(tensor) not in positions for tensor in tensors):
            return None
        places = tuple([positions[id(tensor)] for tensor in tensors])
        are_tensors = all(isinstance(x, Tensor) for x in (*args, *kwargs.values(), output))
        given = (len(args), tuple(kwargs)) if are_tensors else None
        returned = batch.events[1]
        assert isinstance(returned, ModuleReturn)
        return cls(run.plan, labels, places, given, returned, frames)

    def is_repeated_by(
        self, run: GraphRun, outputs: Sequence[Any], args: Any, kwargs: Any, output: Any
    ) -> bool:
        """Whether a call with one run of its graph was the same once more, and healthy."""
        run.read()
        if not run.is_finite() or not _are_apart(run):
            return False
        inside = run.args
        assert inside is not None
        known = [inside[at] if at >= 0 else outputs[~at] for at in self.places]
        tensors: Sequence[Any]
        if self.given is not None:  # the labels follow from these
            if len(args) != self.given[0] or tuple(kwargs) != self.given[1]:
                return False
            tensors = *args, *kwargs.values(), output
        else:
            labels, tensors = marks.flatten_call(args, kwargs, output)
            if labels != self.labels:
                return False
        return all(map(operator.is_, tensors, known))


def is_one_run(batch: Batch) -> bool:
    """Whether nothing happened in a batch but one run of a graph, and the return of the model."""
    return len(batch.events) == 2 and len(batch.runs) == 1 and not batch.values


def _are_apart(run: GraphRun) -> bool:
    """Whether no two inputs of a graph share their memory."""
    inputs = run.plan.inputs
    if len(inputs) < 2:
        return True
    assert run.args is not None
    tensors = [x for position, _ in inputs if isinstance(x := run.args[position], Tensor)]
    return len(set(map(memory_of, tensors))) == len(tensors)
