"""What a second run notes of a backward: the gradient at each edge of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.graph.operations import Call
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import is_float
from fxguard.plan.plan import Place
from fxguard.records import Range

__all__ = ["BackwardOf", "Edge", "Gradients", "Look", "is_differentiable", "when_it_has_come"]


@dataclass(slots=True)
class Edge:
    """An operand of an operation, and the gradient that the operation handed back to it."""

    value: int  # see Gradients.totals
    position: int  # among the tensors that the operation was given
    label: str  # "input[0]", "weight"
    range: Range | None = None  # None where no gradient came


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

    operations: list[BackwardOf] = field(default_factory=list)  # in order of execution, forward
    # The gradient of each value, summed over all that read it; those that none came to are missing.
    totals: dict[int, Range] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)  # of each value, and so of its gradient
    # Position among the graph's inputs to value, of those that are differentiable.
    arguments: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)  # likewise, of the gradients that came in
    # Gradients that are known from the first run, of values to which some came from elsewhere.
    sums: dict[int, Tensor] = field(default_factory=dict)
    # Of others: what the second run has to make, too. What it has made is taken out.
    samples: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)  # value to the name of a weight


@dataclass(slots=True, eq=False)
class Look:
    """A closer look at one operand of an operation, for :func:`gradients_of` to fill in."""

    place: Place  # of the operation
    position: int  # of the operand among the tensors that it was given
    call: Call | None = None
    args: tuple[Any, ...] = ()  # what the operation was given
    kwargs: dict[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] | None = None  # given arguments, computes
    autocast: torch.dtype | None = None  # the dtype of the autocast around it
    random_state: RandomState | None = None  # before it ran, where it draws random numbers
    result: Any = None
    # The gradient of each tensor of the result, by its position; those that none came to are
    # missing.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    outgoing: Tensor | None = None  # the gradient that it handed back to the operand


def is_differentiable(value: Any) -> bool:
    """Whether a gradient may come back to a value."""
    return is_float(value) and value.requires_grad


def when_it_has_come(value: Tensor, note: Callable[[Tensor], Tensor | None]) -> None:
    """Call a function with the gradient of a value, summed over all that read it.

    Where the function returns another gradient, the backward goes on with that one. The node of
    autograd is hooked: hooks on a tensor that is written twice crash torch 2.13.
    """
    node, number = value.grad_fn, value.output_nr
    if node is None:
        value.register_hook(note)
        return

    def pick(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[number]
        other = None if gradient is None else note(gradient)
        if other is None:
            return None
        return (*gradients[:number], other, *gradients[number + 1 :])

    node.register_prehook(pick)
