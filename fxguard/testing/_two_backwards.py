"""Runs a captured graph in two forms under autograd, with a hook on each edge in both."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.graph import tables
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.own_gradients import is_differentiable
from fxguard.graph.wide_form import Ran, is_float
from fxguard.rerun.edges import when_it_has_come
from fxguard.rerun.walk import EdgeWatcher, SecondForm, Walk
from fxguard.testing._both_gradients import BackwardOfBoth, BothGradients, HookOf

__all__ = ["TwoBackwards"]


class TwoBackwards(EdgeWatcher, SecondForm):
    """Another second form under autograd, with a hook on each edge in both forms.

    Args:
        second: that form, which has to be differentiable.
        gradients: the object that the hooks belong to.
        operations: list to which each operation that runs is added.
    """

    def __init__(
        self, second: SecondForm, gradients: BothGradients, operations: list[BackwardOfBoth]
    ) -> None:
        self.second = second
        self.gradients = gradients
        self.operations = operations
        # The operation that ran in the model's form, and its arguments.
        self.found: BackwardOfBoth | None = None
        self.given: tuple[Any, Any] = ((), {})
        self.read: Any = None  # its operands there, if its derivative jumps

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return self.second.wants(walk, node, differs)

    def copy_of(self, memory: Tensor) -> Tensor:
        return self.second.copy_of(memory)

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        self.second.after(walk, node, ran)

    def run(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        picks = node.target is operator.getitem and not isinstance(args[0], Tensor)
        call = walk.call_of(node)
        found = BackwardOfBoth(walk.place(node))
        self.operations.append(found)
        self.found = None
        if walk.levels or picks or call.kind in tables.RESHAPES_IN_PLACE:
            result = walk.run_alone(node, args, kwargs)
            found.is_differentiable = bool(walk.levels) and any(map(is_float, leaves(result)))
            return result
        self.found = found

        def run(*given: Any) -> Any:
            self.given = given
            if _chooses(call):
                self.read = trees.tree_map_only(Tensor, lambda x: x.detach().clone(), given)
            return walk.run_alone(node, *given)

        written = [walk.env[each] for each in call.in_place]
        return _hooked(run, (args, kwargs), written, self.found, self.gradients.of_model)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if self.found is None:
            return self.second.follow(walk, node, ran, args, kwargs)
        ran = replace(ran, args=self.given[0], kwargs=self.given[1])

        def run(*given: Any) -> Any:
            if _chooses(ran.call):
                return self.follow_choosing(walk, node, ran, given)
            return self.second.follow(walk, node, ran, *given)

        written = [walk.others.get(each, walk.env[each]) for each in ran.call.in_place]
        given = (args, kwargs)
        return _hooked(run, given, written, self.found, self.gradients.of_reference)

    def follow_choosing(self, walk: Walk, node: Node, ran: Ran, given: tuple[Any, Any]) -> Any:
        """Run an operation whose derivative jumps with the derivative at the model's operands.

        A relu of 1e-9 and one of -1e-9 are close; their gradients are not.
        """
        copies = trees.tree_map_only(Tensor, lambda x: x.detach().clone(), given)
        value = self.second.follow(walk, node, ran, *copies)
        moved = trees.tree_map(_moved, given, self.read)
        made = trees.tree_map(_moved, self.second.follow(walk, node, ran, *moved), value)
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

    result = run(*trees.tree_map_only(Tensor, alias, given))
    made = {id(x): x for x in (*(copy for _, copy in copies), *leaves(result))}
    for position, value in enumerate(made.values()):
        if is_differentiable(value):
            found.is_differentiable = True
            when_it_has_come(value, hook(found.made[position]))
    for operand, copy in copies:
        operand.copy_(copy)
    operands = {id(copy): operand for operand, copy in copies}
    return trees.tree_map(lambda x: operands.get(id(x), x), result)


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
