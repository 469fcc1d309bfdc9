"""Copies of weights in float32, for graphs that keep some operations in float32."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.measure.at_hand import version_of

__all__ = ["Float32Weights"]


class Float32Weights:
    """Copies of some inputs of a graph, each renewed when its weight may have changed.

    A weight has changed if its ``_version`` or its memory has. It may have changed if a gradient
    has reached it, or if grad mode differs: optimizers, and averaged weights that are swapped in
    for an evaluation, write in ways that do not change the version.

    Args:
        positions: positions of the weights among the inputs.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._copies: dict[int, _Copy] = {}  # by position

    def of(self, args: Sequence[Any]) -> list[Tensor]:
        """The copies for one run."""
        return [self._copy_of(position, args[position]) for position in self.positions]

    def _copy_of(self, position: int, weight: Tensor) -> Tensor:
        copy = self._copies.get(position)
        if copy is None or not copy.is_of(weight):
            self._copies[position] = copy = _Copy(weight)
        if weight.requires_grad and torch.is_grad_enabled():
            copied: Tensor = _Cast.apply(weight, copy)  # type: ignore[no-untyped-call]
            return copied
        return copy.values


class _Copy:
    """One copy, and the state of its original."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.state = _state_of(weight)
        self.values = weight.detach().to(torch.float32)
        self.has_gradient = False  # whether one has reached the weight since

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copy is up to date with the weight."""
        if self.has_gradient or self.weight() is not weight or self.state is None:
            return False
        return self.state == _state_of(weight)


class _Cast(torch.autograd.Function):
    """``weight.to(float32)``, computed earlier."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: _Copy) -> Tensor:
        ctx.copy, ctx.dtype = copy, weight.dtype
        return copy.values.detach()  # autograd changes the object that this returns

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.copy.has_gradient = True
        return gradients[0].to(ctx.dtype), None


def _state_of(weight: Tensor) -> tuple[int, int, bool] | None:
    """A state that changes when somebody writes the weight; None if writes cannot be detected."""
    version = version_of(weight)
    return None if version is None else (version, weight.data_ptr(), torch.is_grad_enabled())
