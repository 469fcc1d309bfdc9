"""Norms of many tensors at once: by C where it can read them, else by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.history._sample import LARGE, sample_of
from fxguard.measure import native

__all__ = ["Number", "largest", "norms"]

Number = float | Tensor  # a tensor of one element stays on its device


def norms(
    tensors: tuple[Tensor, ...], copies: tuple[Tensor, ...] | None = None, *, most: int = LARGE
) -> Sequence[Number]:
    """The Euclidean norms of tensors, in a precision that rounds none to inf.

    Args:
        tensors: plain ones, of any floating-point dtypes.
        copies: of their samples, of an earlier time. Then the norms are those of what has changed
            since, and the copies become the samples.
        most: elements of a sample; 0 for the norms of all elements.
    """
    found = native.norms(tensors, copies, most)
    if found is not None:
        return found
    given = [sample_of(x, most) if most else x.detach() for x in tensors]
    if copies is not None:
        changes = [x - copy for x, copy in zip(given, copies, strict=True)]
        for x, copy in zip(given, copies, strict=True):
            copy.copy_(x)
        given = changes
    return [torch.linalg.vector_norm(_wide(x)) for x in given]


def largest(tensors: tuple[Tensor, ...], *, most: int = LARGE) -> Sequence[Number]:
    """The largest magnitude of each tensor, or of its sample."""
    found = native.largest(tensors, most)
    if found is not None:
        return found
    given = [sample_of(x, most) if most else x for x in tensors]
    ranges = [native.abs_min_max(x) for x in given]
    if all(x is not None for x in ranges):
        return [x[1] for x in ranges if x is not None]
    return [x.abs().amax() for x in given if x.numel()]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float64, torch.complex128) else x.to(_WIDE[x.is_complex()])


_WIDE = (torch.float32, torch.complex64)
