"""A captured graph in a wide dtype under autograd, with a hook wherever a gradient is handed back.

An edge is an operand of an operation; its gradient is what this operation alone returns to it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._backwards import Backwards
from fxguard.comparison._evaluated import with_eps_of
from fxguard.graph import tables
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.own_gradients import is_differentiable
from fxguard.graph.wide_form import Ran, is_float
from fxguard.rerun.edges import when_it_has_come
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

__all__ = ["HookAt", "WideEdges", "hooked", "is_hooked", "jumps"]

HookAt = Callable[[int, Tensor], None]  # hooks a tensor, given its position among others


class WideEdges(WideForm):
    """Every operation in a wide dtype, with signs that may be drawn wherever a gradient enters.

    Args:
        dtype: the wide one.
        backwards: runs the backwards, and draws the signs.
        eps_of: the dtype of which norms have their eps; None for that of the model.
        as_model: whether a derivative that jumps is that at the model's operands: a relu of 1e-9
            and one of -1e-9 are close; their gradients are not.
    """

    whole_functions = True

    def __init__(
        self,
        dtype: torch.dtype,
        backwards: Backwards,
        eps_of: torch.dtype | None = None,
        *,
        as_model: bool = False,
    ) -> None:
        super().__init__(dtype, differentiable=True)
        self.backwards = backwards
        self.eps_of = eps_of
        self.as_model = as_model
        self._read: Any = None  # what an operation whose derivative jumps reads in the model

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if self._follows(walk, walk.call_of(node)):
            self._read = _copied((args, kwargs))

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        ran = with_eps_of(ran, self.eps_of)
        if not self.backwards.draws or not is_hooked(walk, node, args):
            return self.made_of(walk, node, ran, args, kwargs)

        def run(*given: Any) -> Any:
            return self.made_of(walk, node, ran, *given)

        written = [walk.others.get(each, walk.env[each]) for each in ran.call.in_place]
        return hooked(run, (args, kwargs), written, self.at_operand, self.at_result)

    def made_of(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """The result of an operation in the wide dtype."""
        if not self._follows(walk, ran.call):
            return super().follow(walk, node, ran, args, kwargs)
        given = args, kwargs
        value = super().follow(walk, node, ran, *_copied(given))
        moved = trees.tree_map(_moved, given, self._read)
        made = trees.tree_map(_moved, super().follow(walk, node, ran, *moved), value)
        if not ran.call.in_place:
            return made
        operand: Tensor = next(x for x in leaves(given) if isinstance(x, Tensor))
        return operand.copy_(made)

    def _follows(self, walk: Walk, call: Call) -> bool:
        return self.as_model and jumps(call) and not walk.levels

    def at_operand(self, position: int, operand: Tensor) -> None:
        """Hook an operand, given its position among the tensors of the arguments."""
        when_it_has_come(operand, self.backwards.signed)

    def at_result(self, position: int, result: Tensor) -> None:
        """Hook what an operation has made."""


def jumps(call: Call) -> bool:
    """Whether the derivative of an operation jumps where it chooses between its operands."""
    return call.kind.removesuffix("_") in tables.CHOOSES


def is_hooked(walk: Walk, node: Node, args: Any) -> bool:
    """Whether an operation has edges: it does not pick an item, and is not in torch.func."""
    picks = node.target is operator.getitem and not isinstance(args[0], Tensor)
    reshapes = walk.call_of(node).kind in tables.RESHAPES_IN_PLACE
    return not (walk.levels or picks or reshapes)


def hooked(
    run: Callable[..., Any],
    given: tuple[Any, Any],
    written: Sequence[Any],
    at_operand: HookAt,
    at_result: HookAt,
) -> Any:
    """Run an operation on aliases of its operands with hooks, and hook its results.

    A hook on a written alias would be cut off, so a copy is written and copied back.
    """
    positions = itertools.count()
    copies: list[tuple[Tensor, Tensor]] = []

    def alias(value: Tensor) -> Tensor:
        other, position = value, next(positions)
        if is_differentiable(value):
            other = value.view_as(value)
            at_operand(position, other)
        if is_float(value) and any(value is each for each in written):
            other = other.clone()
            copies.append((value, other))
        return other

    result = run(*trees.tree_map_only(Tensor, alias, given))
    made = {id(x): x for x in (*(copy for _, copy in copies), *leaves(result))}
    for position, value in enumerate(made.values()):
        if is_differentiable(value):
            at_result(position, value)
    for operand, copy in copies:
        operand.copy_(copy)
    operands = {id(copy): operand for operand, copy in copies}
    return trees.tree_map(lambda x: operands.get(id(x), x), result)


def _copied(values: Any) -> Any:
    return trees.tree_map_only(Tensor, lambda x: x.detach().clone(), values)


def _moved(value: Any, to: Any) -> Any:
    """A tensor with the numbers of another one; gradients flow back to the first."""
    if not is_float(value) or not isinstance(to, Tensor):
        return value
    return _Moved.apply(value, to)  # type: ignore[no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, to: Tensor) -> Tensor:
        return to.to(value.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
