"""Norms of many tensors at once: by C where it can read them, else by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxguard.history._sample import LARGE, sample_of
from fxguard.measure import native

__all__ = ["Changes", "Number", "changes", "largest", "norms"]

Number = float | Tensor  # a tensor of one element stays on its device


class Changes(NamedTuple):
    """Norms of what tensors have changed since they were copied, of them, and of the copies."""

    change: Sequence[Number]
    now: Sequence[Number]
    before: Sequence[Number]


def norms(tensors: tuple[Tensor, ...], *, most: int = LARGE) -> Sequence[Number]:
    """The Euclidean norms of tensors, in a precision that rounds none to inf.

    Args:
        tensors: plain ones, of any floating-point dtypes.
        most: elements of a sample; 0 for the norms of all elements.
    """
    found = native.norms(tensors, most)
    return found if found is not None else _norms_of(_samples(tensors, most))


def changes(
    tensors: tuple[Tensor, ...], copies: tuple[Tensor, ...], *, most: int = LARGE
) -> Changes:
    """The norms of samples, of copies of an earlier time, and of their differences.

    Args:
        tensors: as in :func:`norms`.
        copies: of their samples; they become the samples of now.
        most: as in :func:`norms`.
    """
    found = native.changes(tensors, copies, most)
    if found is not None:
        return Changes(*found)
    given = _samples(tensors, most)
    differences = [x - copy for x, copy in zip(given, copies, strict=True)]
    result = Changes(*map(_norms_of, (differences, given, copies)))
    for x, copy in zip(given, copies, strict=True):
        copy.copy_(x)
    return result


def largest(tensors: tuple[Tensor, ...], *, most: int = LARGE) -> Sequence[Number]:
    """The largest magnitude of each tensor, or of its sample."""
    found = native.largest(tensors, most)
    if found is not None:
        return found
    given = _samples(tensors, most)
    ranges = [native.abs_min_max(x) for x in given]
    if all(x is not None for x in ranges):
        return [x[1] for x in ranges if x is not None]
    return [x.abs().amax() for x in given if x.numel()]


def _samples(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    return [sample_of(x, most) if most else x.detach() for x in tensors]


def _norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linalg.vector_norm(_wide(x)) for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float64, torch.complex128) else x.to(_WIDE[x.is_complex()])


_WIDE = (torch.float32, torch.complex64)
