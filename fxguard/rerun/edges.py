"""What a second run notes of a backward: the gradient at each edge of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from fxguard.graph.operations import Call
from fxguard.plan.plan import Place
from fxguard.records import Range

__all__ = ["BackwardOf", "Edge", "Gradients", "Look"]


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
    result: Any = None
    # The gradient of each tensor of the result, by its position; those that none came to are
    # missing.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    outgoing: Tensor | None = None  # the gradient that it handed back to the operand
