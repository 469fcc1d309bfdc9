"""Weights that a call is given in place of a model's own, as by ``torch.func.functional_call``."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

__all__ = ["is_lent", "lent_weights"]


def is_lent(weight: Tensor) -> bool:
    """Whether a weight is none of the model's own, while it is called."""
    return type(weight) is Tensor


def lent_weights(model: Module) -> list[Tensor]:
    """The weights that the call is given in which a model runs; none if the first is its own."""
    weights = model.parameters()
    first = next(weights, None)
    if first is None or not is_lent(first):
        return []
    return [first, *filter(is_lent, weights)]
