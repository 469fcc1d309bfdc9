"""The gradients at the edges of a graph in two dtypes, and how far apart they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.comparison._backwards import Backwards, Turn
from fxguard.comparison._rounding import size_of
from fxguard.comparison._wide_edges import WideEdges, hooked, is_hooked
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import Ran, is_float
from fxguard.plan.plan import Place
from fxguard.rerun.differences import relative_error
from fxguard.rerun.edges import when_it_has_come
from fxguard.rerun.walk import EdgeWatcher, Walk

__all__ = ["BackwardOfBoth", "BothEdges"]


@dataclass(slots=True, eq=False)
class GradientOfBoth:
    """One gradient in both dtypes, as its hooks see it."""

    low: Tensor | None = None  # kept until it has been compared
    size: float = 0.0  # the largest magnitude if nothing cancelled
    error: float | None = None  # None if one of the two did not come

    def note(self, gradient: Tensor, turn: Turn | None) -> None:
        """Note a gradient of the wide form.

        The error is relative to the largest magnitude of the reference, or to the size if that is
        larger: a gradient may be small because its terms cancel, as at a bias before a
        normalisation, where it is rightly 0.
        """
        if turn is Turn.SIZES:
            self.size = max(self.size, size_of(gradient.detach()))
        elif turn is Turn.REFERENCE and self.low is not None:
            error = relative_error(self.low, gradient, self.size)
            self.error = max(error, self.error or 0.0)
            self.low = None

    def note_low(self, gradient: Tensor, turn: Turn | None) -> None:
        """Note a gradient of the model."""
        if turn is Turn.MODEL:
            self.low = gradient.detach()


@dataclass(slots=True, eq=False)
class BackwardOfBoth:
    """One operation of a graph, seen from its backward."""

    place: Place
    is_differentiable: bool = False
    # By position among the tensors of its arguments.
    edges: dict[int, GradientOfBoth] = field(default_factory=lambda: defaultdict(GradientOfBoth))
    # Of its results, summed over all readers; by position.
    made: dict[int, GradientOfBoth] = field(default_factory=lambda: defaultdict(GradientOfBoth))

    @property
    def error(self) -> float | None:
        """The largest error of a returned gradient; None if nothing could be compared."""
        return _largest(self.edges.values())

    @property
    def error_before(self) -> float:
        """The largest error of an incoming gradient."""
        return _largest(self.made.values()) or 0.0


def _largest(gradients: Iterable[GradientOfBoth]) -> float | None:
    return max((each.error for each in gradients if each.error is not None), default=None)


class BothEdges(EdgeWatcher, WideEdges):
    """Runs a graph in its own dtype and in a wide one, with a hook on each edge in both.

    Args:
        dtype: the wide one.
        backwards: runs the backwards of both.

    Attributes:
        operations: each operation that ran, in order.
    """

    def __init__(self, dtype: torch.dtype, backwards: Backwards) -> None:
        super().__init__(dtype, backwards, as_model=True)
        self.operations: list[BackwardOfBoth] = []
        # The operation that ran in its own dtype, and its arguments.
        self._given: tuple[Any, Any] = ((), {})

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def run(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        found = BackwardOfBoth(walk.place(node))
        self.operations.append(found)
        if not is_hooked(walk, node, args):
            self._given = args, kwargs
            result = walk.run_alone(node, args, kwargs)
            found.is_differentiable = bool(walk.levels) and any(map(is_float, leaves(result)))
            return result

        def run(*given: Any) -> Any:
            self._given = given
            return walk.run_alone(node, *given)

        written = [walk.env[each] for each in walk.call_of(node).in_place]
        return hooked(run, (args, kwargs), written, self._at_low_operand, self._at_low_result)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        ran = replace(ran, args=self._given[0], kwargs=self._given[1])
        return super().follow(walk, node, ran, args, kwargs)

    def at_operand(self, position: int, operand: Tensor) -> None:
        gradient = self.operations[-1].edges[position]

        def note(value: Tensor) -> Tensor | None:
            gradient.note(value, self.backwards.turn)
            return self.backwards.signed(value)

        when_it_has_come(operand, note)

    def at_result(self, position: int, result: Tensor) -> None:
        gradient = self._made(position)
        when_it_has_come(result, lambda value: gradient.note(value, self.backwards.turn))

    def _at_low_operand(self, position: int, operand: Tensor) -> None:
        gradient = self.operations[-1].edges[position]
        when_it_has_come(operand, lambda value: gradient.note_low(value, self.backwards.turn))

    def _at_low_result(self, position: int, result: Tensor) -> None:
        gradient = self._made(position)
        when_it_has_come(result, lambda value: gradient.note_low(value, self.backwards.turn))

    def _made(self, position: int) -> GradientOfBoth:
        self.operations[-1].is_differentiable = True
        return self.operations[-1].made[position]
