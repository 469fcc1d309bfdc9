"""Runs a captured graph in float64 beside the model, and compares each operation with itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.budget._choices import ChoseAt, at_own_indices, chosen_otherwise, chosen_wide
from fxguard.budget._shares import Shares
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.func_levels import levels_left, levels_opened_by, without_levels
from fxguard.plan.plan import Place
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import EXACT, WideForm

__all__ = ["WIDE", "ChoosesItself", "InFloat64"]

WIDE = torch.float64
_BATCH_NORM = inspect.signature(torch.nn.functional.batch_norm)
CUTS = frozenset({"detach", "detach_"})  # not for mathematics
BACKWARDS = frozenset({"_autograd_grad"})  # those of torch.func


class InFloat64(WideForm):
    """Runs every operation in float64, on the float64 results of earlier ones, with gradients.

    It differentiates what the model computes: also what stands under ``no_grad``, and beyond
    ``detach``. Integers, booleans and indices are those of the model.

    Args:
        shares: gets the own error of each operation.
        key_of: gives the key of a place in :class:`Shares`.
        went_on: called after each operation.

    Attributes:
        leaves: what depends on nothing that has a gradient, such as positions.
        chose: what each operation chose otherwise, in all its runs.
    """

    def __init__(
        self,
        shares: Shares,
        key_of: Callable[[Place], Hashable],
        went_on: Callable[[], None],
    ) -> None:
        super().__init__(WIDE, differentiable=True)
        self.shares, self.key_of, self.went_on = shares, key_of, went_on
        self.leaves: list[Tensor] = []
        self.chose: dict[Place, ChoseAt] = {}
        self._before: tuple[Any, Any] | None = None  # the arguments of an operation that writes

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        self._before = None
        if levels_opened_by(node.target) == 1:  # the mode in which torch.func differentiates
            torch.set_grad_enabled(True)
        if walk.call_of(node).written:
            self._before = trees.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if levels_opened_by(node.target) == 1:
            torch.set_grad_enabled(False)
        place, before = walk.place(node), self._before
        chose = chosen_otherwise(ran, args, kwargs, WIDE)
        if chose is not None:
            self.chose.setdefault(place, ChoseAt.of_node(node, ran.call.kind)).add(chose)
        with torch.enable_grad():
            if ran.call.kind in CUTS and is_float(ran.result):
                return leaves((args, kwargs))[0]
            for each in ran.call.written:
                if isinstance(other := walk.others.get(each), Tensor) and not walk.levels:
                    self.shares.room.before_write(other)
            wide = self._followed(walk, node, ran, args, kwargs)
            wide = at_own_indices(ran, args, kwargs, wide)
            if not walk.levels:  # inside torch.func, nothing can be made a leaf
                wide = trees.tree_map(self._with_gradient, wide)
        if not (ran.call.selects or ran.call.kind in EXACT):
            given = ran if before is None else replace(ran, args=before[0], kwargs=before[1])
            self._compare(walk, node, given, wide)
        self.went_on()
        return wide

    def _followed(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """The float64 result of an operation, with gradients of all that it reads."""
        if ran.target is torch.nn.functional.batch_norm:
            given = _BATCH_NORM.bind(*args, **kwargs)
            given.apply_defaults()
            if not given.arguments["training"] and given.arguments["running_mean"] is not None:
                return normalized(*given.args)
        if ran.call.apart:  # statistics, which are updated and not read
            apart = {id(walk.others.get(each)) for _, each in ran.call.apart}
            args, kwargs = trees.tree_map_only(
                Tensor, lambda x: x.detach() if id(x) in apart else x, (args, kwargs)
            )
        return super().follow(walk, node, ran, args, kwargs)

    def _compare(self, walk: Walk, node: Node, ran: Ran, wide: Any) -> None:
        """Note the own errors of an operation: of its results, and of what it wrote beside them."""
        place = walk.place(node)
        written = [x for x in ran.call.written if is_float(walk.env[x])]
        if place in self.taken_over or not (ran.has_floats or written):
            return
        if ran.call.kind in BACKWARDS:
            self.taken_over[place] = (
                "a derivative of torch.func, whose operations are not measured one by one"
            )
            return
        try:
            with torch.no_grad():
                given = widened((ran.args, ran.kwargs), WIDE)
                exact = wide_result(ran, given[0], given[1], WIDE)
        except NotJudged as reason:
            self.taken_over[place] = str(reason)
            return
        made = list(zip(leaves(ran.result), leaves(exact), leaves(wide), strict=True))
        operands = dict(zip(leaves((node.args, node.kwargs)), leaves(given), strict=True))
        for each in written:
            if not any(low is walk.env[each] for low, _, _ in made):
                made.append((walk.env[each], operands[each], walk.others[each]))
        key = self.key_of(place)
        self.shares.of(key).count += 1
        for low, one, other in made:
            if is_float(low):
                self.shares.room.take(low)
                with levels_left():
                    self.shares.add(key, *map(without_levels, (low, one, other)))

    def _with_gradient(self, value: Any) -> Any:
        """A tensor that depends on nothing with a gradient, as one that has."""
        if not is_float(value) or value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf.clone()  # what is no leaf may be written


def normalized(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalisation with given statistics, of which torch gives no gradients."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    made = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    made = made if weight is None else made * weight.view(shape)
    return made if bias is None else made + bias.view(shape)


class ChoosesItself(WideForm):
    """Runs every operation in float64, those that make integers and booleans too."""

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) and not is_float(x) for x in leaves(ran.result)):
            chosen = chosen_wide(ran, args, kwargs, WIDE)
            if chosen is not None:
                return widened(chosen, WIDE)
        return super().follow(walk, node, ran, args, kwargs)
