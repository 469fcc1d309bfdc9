"""The magnitude ranges in a graph that Inductor compiles.

The reductions are arithmetic, as in :mod:`fxguard.measure.traceable`, and are fused into the
loops that make the values. To join their results is one call of an operation that Inductor does
not look into. It would write each number of a ``stack`` into its place from inside the kernel that
makes it, and copy the others in kernels next to it; then equal layers have fewer kernels in common,
and the C++ compiler runs more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.measure import traceable

__all__ = ["abs_min_max", "collect"]


def abs_min_max(value: Any) -> traceable.Pair:
    """The smallest magnitude, negated, and the largest, for :func:`collect`.

    The smallest is found as ``amax`` too. What another operation reads AOTAutograd's partitioner
    takes for memory that is written anyway, and keeps for the backward instead of computing it
    again: ``amax`` is on its list of what is fused, ``amin`` is not.
    """
    magnitude = traceable.reducible(value)
    if magnitude is not None:
        return magnitude.neg().amax(), magnitude.amax()
    low, high = traceable.abs_min_max(value)
    return low.neg(), high


@torch.library.custom_op("fxguard::join", mutates_args=())
def join(numbers: Sequence[Tensor]) -> Tensor:
    """Pairs of numbers, shape [] each, as a tensor of shape ``[pairs, 2]``, the first negated."""
    pairs = traceable.stacked(numbers)
    pairs[:, 0].neg_()
    return pairs


@join.register_fake
def _(numbers: Sequence[Tensor]) -> Tensor:
    shape = (len(numbers) // 2, 2)
    device = traceable.common_device(numbers)
    return torch.empty(shape, dtype=traceable.common_dtype(numbers), device=device)


def collect(items: Sequence[traceable.Pair | Tensor]) -> Tensor:
    """Join the results of many checks, as :func:`fxguard.measure.traceable.collect` does."""
    return traceable.collect(items, join)
