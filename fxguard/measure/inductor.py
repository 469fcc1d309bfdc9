"""The magnitude ranges in a graph that Inductor compiles.

The reductions are arithmetic, as in :mod:`fxguard.measure.traceable`, and are fused into the loops
that make the values. Their results are joined by one call of an operation that Inductor does not
look into. With a ``stack``, Inductor would write each number into its place from inside the kernel
that makes it, and copy the others in neighbouring kernels; then equal layers would share fewer
kernels, and the C++ compiler would run more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.measure import eager, native, traceable

__all__ = ["abs_min_max", "abs_min_max_in_memory", "collect", "is_large"]

LARGE = 2**18  # elements


def abs_min_max(value: Any) -> traceable.Pair:
    """The smallest magnitude, negated, and the largest, for :func:`collect`.

    The smallest is also found with ``amax``. If an operation that is not fused reads a value,
    AOTAutograd's partitioner assumes that the value is written to memory anyway, and keeps it for
    the backward instead of computing it again. ``amax`` is on the partitioner's list of fused
    operations; ``amin`` is not.
    """
    magnitude = traceable.reducible(value)
    if magnitude is not None:
        return magnitude.neg().amax(), magnitude.amax()
    low, high = traceable.abs_min_max(value)
    return low.neg(), high


@torch.library.custom_op("fxguard::read", mutates_args=())
def read(value: Tensor) -> tuple[Tensor, Tensor]:
    """The result of :func:`abs_min_max` for a tensor that is in memory."""
    low, high = eager.abs_min_max(value)
    dtype = value.dtype if value.dtype is torch.float64 else torch.float32
    return torch.as_tensor(low, dtype=dtype).neg(), torch.as_tensor(high, dtype=dtype)


@read.register_fake
def _(value: Tensor) -> tuple[Tensor, Tensor]:
    dtype = value.dtype if value.dtype is torch.float64 else torch.float32
    return value.new_empty((), dtype=dtype), value.new_empty((), dtype=dtype)


def abs_min_max_in_memory(value: Tensor) -> traceable.Pair:
    """The same as :func:`abs_min_max`, for a large tensor that the graph is given or writes into.

    It is read in C, in a fifth of the time of Inductor's own loop.
    """
    pair: traceable.Pair = read(value.detach())
    return pair


def is_large(example: Any) -> bool:
    """Whether reading a tensor of this form in C is worth a call."""
    if not native.is_built or not isinstance(example, Tensor):  # the graph may not know its form
        return False
    size = example.numel()
    return (
        example.device.type == "cpu"
        and example.dtype in eager.INTEGERS
        and example.layout is torch.strided
        and isinstance(size, int)  # and not a symbol
        and size >= LARGE
    )


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
