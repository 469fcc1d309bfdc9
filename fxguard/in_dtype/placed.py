"""Inputs where a model computes: on its device, in its dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard import trees

__all__ = ["placed"]


def placed(model: Module, given: Any) -> Any:
    """Copies of all tensors in a nest, on the device and in the dtype of a model's weights.

    Args:
        model: its first floating-point parameter decides; without one, nothing is converted.
        given: any nest; integers keep their dtype.
    """
    first = next((x for x in model.parameters() if x.is_floating_point()), None)

    def convert(x: Tensor) -> Tensor:
        copy = x.detach().clone()
        if first is not None:
            copy = copy.to(first.device, first.dtype if x.is_floating_point() else None)
        return copy.requires_grad_(x.requires_grad)

    return trees.tree_map_only(Tensor, convert, given)
