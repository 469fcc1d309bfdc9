"""Other contents in the place of some elements of an input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.graph.wide_form import is_float

__all__ = ["WAYS", "drawn", "spread"]

WAYS = 2  # of other contents


def drawn(x: Tensor, where: Tensor, way: int) -> Tensor:
    """A tensor with other elements in some places: those of other places, floats with other sizes.

    So they are such as the model takes: tokens that exist, numbers of the usual magnitude.

    Args:
        x: the tensor.
        where: the places; boolean, of the same shape.
        way: each draws other ones.
    """
    generator = torch.Generator().manual_seed(way)
    where, pool = where.to(x.device), x.flatten()
    index = torch.randint(len(pool), (int(where.sum()),), generator=generator)
    found = pool[index.to(x.device)]
    if is_float(x):
        factors = (0.5 + torch.rand(found.shape, generator=generator)).to(x.device, x.dtype)
        found = found * factors if bool((found != 0).any()) else factors
    elif bool((found == x[where]).all()):
        found = pool.max() + pool.min() - found
    return x.masked_scatter(where, found)


def spread(size: int, most: int) -> Sequence[int]:
    """Numbers below a size, at most so many: the first and the last ones, and others between."""
    if size <= most:
        return range(size)
    ends = most // 4
    between = torch.linspace(ends, size - ends - 1, most - 2 * ends).long().tolist()
    return sorted({*range(ends), *between, *range(size - ends, size)})
