"""Copies of inputs that a graph will write, so that a second run can start like the first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.wide_form import is_float
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.eager import is_observed
from fxguard.measure.free_memory import has_room
from fxguard.measure.waiting import is_on_a_gpu
from fxguard.plan.plan import Plan
from fxguard.records import Role
from fxguard.torch_names import copy_each

__all__ = ["Copies", "Spare"]

LARGE = 2**20  # bytes from which on memory is reused


class Spare:
    """The memory of the copies of the last run of any graph.

    Memory that nobody holds is reused. Large pieces come fresh from the system, page by page, which
    takes longer than copying.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> list[Tensor]:
        """Take all of the memory; nothing is left for others."""
        with self._lock:
            memory, self._memory = self._memory, []
        return memory

    def give(self, memory: list[Tensor]) -> None:
        """Put back the memory of a run, in place of any other."""
        self._memory = memory


class Copies:
    """Copies of the inputs that one graph writes.

    Args:
        plan: the plan of the graph.
        spare: memory for the copies.
    """

    def __init__(self, plan: Plan, spare: Spare) -> None:
        self.positions = plan.overwritten
        self.inputs = {value.argument for value in plan.values if value.role is Role.INPUT}
        self.spare = spare

    def of(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """The arguments of a run, with copies of those that it will write.

        The copy of an input requires a gradient if the input does, for the backward of a second
        run.

        Returns:
            None if there is no room for copies: a healthy model needs none.
        """
        if not self.positions:
            return tuple(args)
        kept, spare, used = list(args), self.spare.take(), list[Tensor]()
        with own_arithmetic():
            if not has_room([args[position] for position in self.positions]):
                return None
            try:
                together = _copies_together([args[position] for position in self.positions])
            except RuntimeError:  # out of memory
                return None
            for position, made in zip(self.positions, together, strict=True):
                argument = args[position]
                try:
                    copy = _copy_of(argument, spare, used) if made is None else made
                except RuntimeError:  # out of memory
                    return None
                kept[position] = copy
                if position in self.inputs and is_float(copy):
                    copy.requires_grad_(argument.requires_grad)
        self.spare.give(used)
        return tuple(kept)


def _copies_together(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Copies by one launch of those that are on a GPU; None for each other tensor."""
    found: list[Tensor | None] = [None] * len(tensors)
    places = [place for place, tensor in enumerate(tensors) if _is_plain_on_a_gpu(tensor)]
    if len(places) > 1:
        originals = [tensors[place].detach() for place in places]
        copies = [torch.empty_like(original) for original in originals]
        copy_each(copies, originals)
        for place, copy in zip(places, copies, strict=True):
            found[place] = copy
    return found


def _is_plain_on_a_gpu(tensor: Tensor) -> bool:
    return (
        is_on_a_gpu(tensor)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
    )


def _copy_of(tensor: Tensor, spare: list[Tensor], used: list[Tensor]) -> Tensor:
    """A copy, in a fitting piece of spare memory if there is one; notes the used memory."""
    if not _may_be_kept(tensor):
        return tensor.detach().clone()
    for index, memory in enumerate(spare):
        if _looks_like(memory, tensor) and not _is_held(memory):
            used.append(spare.pop(index))
            return memory.detach().copy_(tensor.detach())
    used.append(tensor.detach().clone())
    return used[-1].detach()


def _may_be_kept(tensor: Tensor) -> bool:
    """Whether the memory of a copy may be reused, because its holders can be found out."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu  # CUDA's allocator keeps memory itself
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
        and not torch.is_inference_mode_enabled()
        and tensor.numel() * tensor.element_size() >= LARGE
        and hasattr(torch._C, "_storage_Use_Count")
        and not is_observed()  # otherwise the copy may be a tensor without memory
    )


def _looks_like(memory: Tensor, tensor: Tensor) -> bool:
    return (
        memory.shape == tensor.shape
        and memory.dtype is tensor.dtype
        and memory.stride() == tensor.stride()
    )


def _is_held(memory: Tensor) -> bool:
    """Whether anything other than ``memory`` itself uses its memory."""
    storage = memory.untyped_storage()  # counts as a user as well
    return torch._C._storage_Use_Count(storage._cdata) > 2
