"""The record of a backward in a second run: the gradient at each edge of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.graph.operations import Call
from fxguard.graph.wide_form import Ran
from fxguard.plan.plan import Place
from fxguard.records import Range

__all__ = ["BackwardOf", "Edge", "Gradients", "Look", "when_it_has_come"]


@dataclass(slots=True)
class Edge:
    """An operand of an operation, and the gradient that the operation returned to it."""

    value: int  # see Gradients.totals
    position: int  # among the tensors of the operation's arguments
    label: str  # "input[0]", "weight"
    range: Range | None = None  # None if no gradient came


@dataclass(slots=True, eq=False)
class BackwardOf:
    """One operation of the graph, seen from its backward."""

    place: Place
    node: Node
    call: Call
    edges: list[Edge] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # values


@dataclass(slots=True)
class Gradients:
    """Every gradient of one backward of a graph."""

    operations: list[BackwardOf] = field(default_factory=list)  # in the order of the forward
    # The gradient of each value, summed over all readers; values without a gradient are missing.
    totals: dict[int, Range] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)  # of each value and its gradient
    # Position among the graph's inputs to value, for differentiable inputs.
    arguments: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)  # likewise for incoming gradients
    incoming: dict[int, Range | str] = field(default_factory=dict)  # their ranges, by position
    # Gradients known from the first run, for values that also got gradients from elsewhere.
    sums: dict[int, Tensor] = field(default_factory=dict)
    # Samples that the second run has to reproduce for other values; reproduced ones are removed.
    samples: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)  # value to the weight's name
    # Places of operations whose gradient is that of other random numbers than the model's.
    anew: set[Place] = field(default_factory=set)

    def drawn_anew(self, operation: BackwardOf) -> str:
        """The operation, of this one and those after it, that drew other random numbers; or ""."""
        later = itertools.dropwhile(lambda each: each is not operation, self.operations)
        return next((each.call.kind for each in later if each.place in self.anew), "")


@dataclass(slots=True, eq=False)
class Look:
    """A closer look at one operand of an operation, for :func:`gradients_of` to fill in."""

    place: Place  # of the operation
    position: int  # of the operand among the tensors of its arguments
    ran: Ran | None = None  # with copies of its operands; None if it was not seen
    autocast: torch.dtype | None = None  # the dtype of the autocast around it
    # The gradient of each tensor of the result, by position; tensors without a gradient are
    # missing.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    outgoing: Tensor | None = None  # the gradient that it returned to the operand

    @property
    def seen(self) -> Ran:
        """The operation, which was seen."""
        assert self.ran is not None
        return self.ran


def when_it_has_come(value: Tensor, note: Callable[[Tensor], Tensor | None]) -> None:
    """Call a function with the gradient of a value, summed over all readers.

    If the function returns another gradient, the backward continues with that. It is not called for
    a value that gets no gradient. The autograd node is hooked, because hooks on a tensor that is
    written twice crash torch 2.13.
    """
    node, number = value.grad_fn, value.output_nr
    if node is None:
        value.register_hook(lambda gradient: None if gradient is None else note(gradient))
        return

    def pick(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[number]
        other = None if gradient is None else note(gradient)
        if other is None:
            return None
        return (*gradients[:number], other, *gradients[number + 1 :])

    node.register_prehook(pick)
