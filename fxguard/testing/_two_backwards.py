"""Runs a captured graph in two forms under autograd, with a hook on each edge in both."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import higher_order, tables
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.wide_form import Ran, is_float
from fxguard.measure.func_levels import levels_opened_by
from fxguard.rerun.edges import is_differentiable, when_it_has_come
from fxguard.rerun.lockstep import Lockstep, SecondForm
from fxguard.testing._both_gradients import BackwardOfBoth, BothGradients, HookOf

__all__ = ["TwoBackwards"]


class TwoBackwards(Lockstep):
    """Runs a graph and its bodies in two forms under autograd, and hooks each edge in both.

    Args:
        module: the graph.
        second: defines the second form, which has to be differentiable.
        gradients: the object that the hooks belong to.
        operations: list to which each operation that runs is added.
        inside: the bodies around it, see :class:`~fxguard.plan.plan.Check`.
    """

    def __init__(
        self,
        module: GraphModule,
        second: SecondForm,
        gradients: BothGradients,
        operations: list[BackwardOfBoth],
        inside: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(module, second, inside)
        self.gradients = gradients
        self.operations = operations
        self.levels = 0  # open torch.func regions, where nothing is hooked
        # The operation that ran in the model's form, and its arguments.
        self.found: BackwardOfBoth | None = None
        self.given: tuple[Any, Any] = ((), {})
        self.read: Any = None  # its operands there, if its derivative jumps

    def kind_of(self, node: Node) -> higher_order.HigherOrder | None:
        kind = super().kind_of(node)
        return None if kind is not None and kind.has_own_backward else kind

    def nested(self, module: GraphModule, inside: tuple[tuple[str, int], ...]) -> Lockstep:
        return TwoBackwards(module, self.second, self.gradients, self.operations, inside)

    def run_plain(self, node: Node, args: Any, kwargs: Any) -> Any:
        self.levels += levels_opened_by(node.target)
        picks = node.target is operator.getitem and not isinstance(args[0], Tensor)
        call = self.call_of(node)
        found = BackwardOfBoth(self.place(node))
        self.operations.append(found)
        self.found = None
        if self.levels or picks or call.kind in tables.RESHAPES_IN_PLACE:
            result = super().run_plain(node, args, kwargs)
            found.is_differentiable = bool(self.levels) and any(map(is_float, leaves(result)))
            return result
        self.found = found

        def run(*given: Any) -> Any:
            self.given = given
            if _chooses(call):
                self.read = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given)
            return Lockstep.run_plain(self, node, *given)

        written = [self.env[each] for each in call.in_place]
        return _hooked(run, (args, kwargs), written, self.found, self.gradients.of_model)

    def run_other(self, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if self.found is None:
            return super().run_other(node, ran, args, kwargs)
        ran = replace(ran, args=self.given[0], kwargs=self.given[1])

        def run(*given: Any) -> Any:
            if _chooses(ran.call):
                return self.run_choosing(node, ran, given)
            return Lockstep.run_other(self, node, ran, *given)

        written = [self.others.get(each, self.env[each]) for each in ran.call.in_place]
        given = (args, kwargs)
        return _hooked(run, given, written, self.found, self.gradients.of_reference)

    def run_choosing(self, node: Node, ran: Ran, given: tuple[Any, Any]) -> Any:
        """Run an operation whose derivative jumps with the derivative at the model's operands.

        A relu of 1e-9 and one of -1e-9 are close; their gradients are not.
        """
        copies = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given)
        value = super().run_other(node, ran, *copies)
        moved = pytree.tree_map(_moved, given, self.read)
        made = pytree.tree_map(_moved, super().run_other(node, ran, *moved), value)
        if not ran.call.in_place:
            return made
        operand: Tensor = next(x for x in leaves(given) if isinstance(x, Tensor))
        return operand.copy_(made)


def _chooses(call: Call) -> bool:
    return call.kind.removesuffix("_") in tables.CHOOSES


def _hooked(
    run: Callable[..., Any],
    given: tuple[Any, Any],
    written: Sequence[Any],
    found: BackwardOfBoth,
    hook: HookOf,
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
            when_it_has_come(other, hook(found.edges[position]))
        if is_float(value) and any(value is each for each in written):
            other = other.clone()
            copies.append((value, other))
        return other

    result = run(*pytree.tree_map_only(Tensor, alias, given))
    made = {id(x): x for x in (*(copy for _, copy in copies), *leaves(result))}
    for position, value in enumerate(made.values()):
        if is_differentiable(value):
            found.is_differentiable = True
            when_it_has_come(value, hook(found.made[position]))
    for operand, copy in copies:
        operand.copy_(copy)
    operands = {id(copy): operand for operand, copy in copies}
    return pytree.tree_map(lambda x: operands.get(id(x), x), result)


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
