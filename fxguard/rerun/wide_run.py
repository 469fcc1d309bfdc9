"""A captured graph in the wide form from its beginning, beside the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.graph.tables import MOVES
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.plan.plan import Place
from fxguard.rerun.lockstep import Lockstep, SecondForm

__all__ = ["WideForm"]

# What these make of operands that are the same in both forms is the same.
EXACT = MOVES | {"embedding"}


class WideForm(SecondForm):
    """Every operation in float64, on what earlier ones made in float64.

    What has no wide form takes over what the model made.

    Args:
        dtype: the wide one.

    Attributes:
        taken_over: the operations that have no wide form, and why.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.taken_over: dict[Place, str] = {}

    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        call = step.call_of(node)
        return differs or bool(call.written) or not (call.selects or call.kind in EXACT)

    def copy_of(self, memory: Tensor) -> Tensor:
        copied: Tensor = widened(memory, self.dtype).clone()
        return copied

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        written = [each for each in ran.call.written if is_float(step.env[each])]
        if not ran.has_floats and not written:
            return ran.result
        try:
            wide_args, wide_kwargs = widened((args, kwargs), self.dtype)
            return wide_result(ran, wide_args, wide_kwargs, self.dtype)
        except NotJudged as reason:
            self.taken_over[step.place(node)] = str(reason)
            for operand in written:
                step.others[operand].copy_(step.env[operand])
            return step.others[written[0]] if ran.call.in_place and written else ran.result
