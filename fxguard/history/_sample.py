"""The elements of a tensor that are compared from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.measure import native
from fxguard.measure.parts import part_here

__all__ = ["LARGE", "are_alike", "like", "parts_here", "sample_of"]

LARGE = 2**16  # elements: of a larger tensor, so many are copied and compared


def parts_here(tensors: tuple[Any, ...]) -> Sequence[Tensor | None]:
    """The same of many: they themselves, in one call of C, where all are plain ones on a CPU."""
    return tensors if native.are_here(tensors, None, LARGE) else [*map(part_here, tensors)]


def sample_of(x: Tensor, most: int = LARGE) -> Tensor:
    """All elements, or as many as are compared of a large tensor, evenly spread."""
    x = x.detach()
    return x if x.numel() <= most else x.reshape(-1)[:: -(-x.numel() // most)]


def like(copy: Tensor, sample: Tensor) -> Tensor | None:
    """A copy with as many rows as a sample, filled up with 0; None if it is of another form."""
    if are_alike(copy, sample):
        return copy.clone()
    if not copy.dim() or copy.dim() != sample.dim() or copy.shape[1:] != sample.shape[1:]:
        return None
    if copy.dtype != sample.dtype or copy.device != sample.device:
        return None
    found, rows = torch.zeros_like(sample), min(len(copy), len(sample))
    found[:rows] = copy[:rows]
    return found


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two tensors can be compared one by one."""
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
