"""A few elements of a gradient, in its place: enough to tell whether another run made the same one.

The gradient of logits is as large as they are. Where it comes from a loss that the same graph has
made, a second run makes it again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from fxguard.plan.plan import Plan

__all__ = ["inner_outputs", "is_sample_of", "sample_of"]

LARGE = 2**16  # elements, from which on a gradient is not kept where a sample will do
ELEMENTS = 64
TOLERANCE = 1e-3  # atomic additions of a GPU come in any order


def sample_of(gradient: Tensor) -> Tensor:
    """Elements on the diagonal of a tensor that has some."""
    with torch._C.DisableTorchFunction():
        return gradient.detach()[_diagonal(gradient.shape, gradient.device)]


@functools.lru_cache(maxsize=64)
def _diagonal(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    ends = (torch.linspace(0, size - 1, ELEMENTS, device=device) for size in shape)
    return tuple(end.long() for end in ends)


def is_sample_of(sample: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor has these elements, but for roundings."""
    other = sample_of(gradient)
    largest = float(sample.nan_to_num(0, 0, 0).abs().amax())
    return torch.allclose(
        other.double(), sample.double(), TOLERANCE, TOLERANCE * largest, equal_nan=True
    )


def inner_outputs(plan: Plan, outputs: Mapping[int, Tensor]) -> dict[int, set[int]]:
    """Large outputs of a graph that losses among its outputs are made of.

    Args:
        plan: of the graph.
        outputs: what it has returned, by position.

    Returns:
        Position of each to the positions of those losses.
    """
    inner: dict[int, set[int]] = {}
    for loss in (position for position, output in outputs.items() if output.numel() == 1):
        for position in plan.outputs_made_of[loss] & outputs.keys():
            if outputs[position].numel() >= LARGE:
                inner.setdefault(position, set()).add(loss)
    return inner
