"""Samples of a gradient, kept in its place to recognise it in another run.

The gradient of logits is as large as the logits. If it comes from a loss in the same graph, a
second run computes it again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from fxguard.plan.plan import Plan
from fxguard.torch_names import DisableTorchFunction

__all__ = ["inner_outputs", "is_sample_of", "sample_of"]

LARGE = 2**16  # elements: larger gradients are not kept if a sample is enough
ELEMENTS = 64
TOLERANCE = 1e-3  # atomic additions on a GPU have no fixed order


def sample_of(gradient: Tensor) -> Tensor:
    """Elements on the diagonal of a nonempty tensor."""
    with DisableTorchFunction():
        return gradient.detach()[_diagonal(gradient.shape, gradient.device)]


@functools.lru_cache(maxsize=64)
def _diagonal(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    ends = (torch.linspace(0, size - 1, ELEMENTS, device=device) for size in shape)
    return tuple(end.long() for end in ends)


def is_sample_of(sample: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor has these elements, up to roundings."""
    other = sample_of(gradient)
    largest = float(sample.nan_to_num(0, 0, 0).abs().amax())
    return torch.allclose(
        other.double(), sample.double(), TOLERANCE, TOLERANCE * largest, equal_nan=True
    )


def inner_outputs(plan: Plan, outputs: Mapping[int, Tensor]) -> dict[int, set[int]]:
    """Large outputs of a graph that losses among its outputs depend on.

    Args:
        plan: the plan of the graph.
        outputs: its outputs, by position.

    Returns:
        Position of each such output to the positions of the losses.
    """
    inner: dict[int, set[int]] = {}
    for loss in (position for position, output in outputs.items() if output.numel() == 1):
        for position in plan.outputs_made_of[loss] & outputs.keys():
            if outputs[position].numel() >= LARGE:
                inner.setdefault(position, set()).add(loss)
    return inner
