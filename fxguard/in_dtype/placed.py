"""Where a model computes, and inputs there: on its device, in its dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["converter", "place_of"]

Place = tuple[torch.device, torch.dtype | None]


def place_of(model: Module) -> Place:
    """Where a model computes: the device and the dtype of its first floating-point parameter."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    return device, next((p.dtype for p in parameters if p.is_floating_point()), None)


def converter(place: Place | None) -> Callable[[Tensor], Tensor]:
    """Returns a function that copies an input as a model takes it; a model may write into the copy.

    Args:
        place: place of the model; None if the input is passed unchanged.
    """

    def convert(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if place is not None:
            device, dtype = place
            copy = copy.to(device, dtype if tensor.is_floating_point() else None)
        return copy.requires_grad_(tensor.requires_grad)

    return convert
