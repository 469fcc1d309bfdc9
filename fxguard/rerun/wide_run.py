"""Runs a captured graph in the wide form throughout, alongside the model's own form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.graph import nodes
from fxguard.graph.own_gradients import is_differentiable
from fxguard.graph.tables import MOVES
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.plan.plan import Place
from fxguard.rerun.walk import SecondForm, Walk

__all__ = ["WideForm"]

# Results of these are the same in both forms if their operands are.
EXACT = MOVES | {"embedding"}


class WideForm(SecondForm):
    """Runs every operation in float64, on the float64 results of earlier ones.

    Operations without a wide form take over the model's result.

    Args:
        dtype: the wide one.
        differentiable: whether gradients flow back through it.

    Attributes:
        taken_over: the operations without a wide form, and why.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, *, differentiable: bool = False) -> None:
        self.dtype = dtype
        self.differentiable = differentiable
        self.taken_over: dict[Place, str] = {}

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        call = walk.call_of(node)
        return differs or bool(call.written) or not (call.selects or call.kind in EXACT)

    def copy_of(self, memory: Tensor) -> Tensor:
        copied: Tensor = widened(memory, self.dtype).clone()
        return copied

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        written = [each for each in ran.call.written if is_float(walk.env[each])]
        if not ran.has_floats and not written:
            return ran.result
        try:
            wide_args, wide_kwargs = widened(
                (args, kwargs), self.dtype, differentiable=self.differentiable
            )
            return wide_result(
                ran, wide_args, wide_kwargs, self.dtype, differentiable=self.differentiable
            )
        except NotJudged as reason:
            self.taken_over[walk.place(node)] = str(reason)
            if self.differentiable:
                return self._taken_over(ran, args, kwargs, written)
            for operand in written:
                walk.others[operand].copy_(walk.env[operand])
            return walk.others[written[0]] if ran.call.in_place and written else ran.result

    def _taken_over(self, ran: Ran, args: Any, kwargs: Any, written: list[Node]) -> Any:
        """The model's result and its backward, both in the wide dtype."""
        if written:
            raise NotJudged(f"{ran.call.kind} writes, and has no {self.dtype} form")
        leaves = nodes.leaves((ran.args, ran.kwargs)), nodes.leaves((args, kwargs))
        pairs = [pair for pair in zip(*leaves, strict=True) if is_differentiable(pair[1])]
        low, wide = [x for x, _ in pairs], [x for _, x in pairs]
        made = [x for x in nodes.leaves(ran.result) if is_float(x)]
        if not wide:
            return trees.tree_map_only(Tensor, lambda x: widened(x, self.dtype), ran.result)
        results = iter(_ModelsOwn.apply(self.dtype, low, made, *wide))  # type: ignore[no-untyped-call]
        return trees.tree_map(lambda x: next(results) if is_float(x) else x, ran.result)


class _ModelsOwn(torch.autograd.Function):
    """The model's result on some operands, in place of its result on others."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, operands: list[Any], made: list[Tensor], *others: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.operands, ctx.made, ctx.dtypes = operands, made, [x.dtype for x in others]
        results: tuple[Tensor, ...] = tuple(widened(x, dtype).clone() for x in made)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = zip(ctx.made, gradients, strict=True)
        given = [(x, gradient.to(x.dtype)) for x, gradient in pairs if x.requires_grad]
        # A frozen weight is differentiable only in the wide form, and its gradient is not needed.
        operands = [x for x in ctx.operands if is_differentiable(x)]
        found: Iterator[Tensor | None] = iter(())
        if given and operands:
            found = iter(
                torch.autograd.grad(
                    [x for x, _ in given],
                    operands,
                    [gradient for _, gradient in given],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        wide = []
        for operand, dtype in zip(ctx.operands, ctx.dtypes, strict=True):
            gradient = next(found, None) if is_differentiable(operand) else None
            wide.append(None if gradient is None else gradient.to(dtype))
        return None, None, None, *wide
