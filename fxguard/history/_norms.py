"""Norms of many tensors at once: by C where it can read them, else by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.measure import native

__all__ = ["Number", "largest", "norms"]

Number = float | Tensor  # a tensor of one element stays on its device


def norms(
    tensors: tuple[Tensor, ...], copies: tuple[Tensor, ...] | None = None
) -> Sequence[Number]:
    """The Euclidean norms of tensors, in a precision that rounds none to inf.

    Args:
        tensors: plain ones, of any floating-point dtypes.
        copies: of them, of an earlier time. Then the norms are those of what has changed since, and
            the copies become the tensors.
    """
    found = native.norms(tensors, copies)
    if found is not None:
        return found
    given = list(tensors)
    if copies is not None:
        given = [x - copy for x, copy in zip(tensors, copies, strict=True)]
        for x, copy in zip(tensors, copies, strict=True):
            copy.copy_(x)
    return [torch.linalg.vector_norm(_wide(x)) for x in given]


def largest(tensors: Sequence[Tensor]) -> Sequence[Number]:
    """The largest magnitude of each tensor."""
    found = [native.abs_min_max(x) for x in tensors]
    ranges = [x for x in found if x is not None]
    if len(ranges) == len(found):
        return [high for _, high in ranges]
    return [x.abs().amax() for x in tensors if x.numel()]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float64, torch.complex128) else x.to(_WIDE[x.is_complex()])


_WIDE = (torch.float32, torch.complex64)
