"""Which elements of a tensor have changed by more than roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from fxguard.graph.wide_form import is_float

__all__ = ["changed", "limit_for", "size_of_change"]

# Units of roundoff of float64: products of matrices of other sizes, as for other tokens of an
# expert, round otherwise.
UNITS = 1e5
# Units of roundoff of the coarsest dtype, in runs of another length: there nothing repeats.
UNITS_OF_LENGTH = 200
FAR = 1e6  # a median magnitude above this is that of masked scores


def limit_for(coarsest: torch.dtype) -> float:
    """The relative change that roundings make in runs of another length.

    Args:
        coarsest: the dtype with the fewest digits in which the model computes something.
    """
    return UNITS_OF_LENGTH * torch.finfo(coarsest).eps / 2


def changed(one: Tensor, two: Tensor, limit: float = 0.0) -> Tensor | None:
    """Which elements have changed; None where shapes or dtypes differ.

    Args:
        one: a tensor of one run.
        two: the same of another run.
        limit: the relative change that roundings make, where it is more than usual.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return None
    if not is_float(one):
        return one != two
    both_nan = one.isnan() & two.isnan()
    size = torch.maximum(one.abs(), two.abs())
    least = max(UNITS * torch.finfo(torch.float64).eps / 2, limit)
    allowed = least * torch.clamp(size, min=_usual(size))
    # A difference of two equal infinities is NaN, which is not above anything.
    return ~both_nan & (one != two) & ~((one - two).abs() <= allowed)


def size_of_change(one: Tensor, two: Tensor) -> float:
    """The largest change, relative to the usual magnitude; 1 for integers."""
    if not is_float(one):
        return float(bool((one != two).any()))
    difference = (one - two).abs()
    size = torch.maximum(one.abs(), two.abs())
    usual = _usual(size)
    most = difference[difference.isfinite()]
    return float(most.max()) / usual if most.numel() and usual else 0.0


def _usual(size: Tensor) -> float:
    """The usual magnitude of elements: the median of those that are finite and not 0."""
    found = size[size.isfinite() & (size > 0)]
    if not found.numel():
        return 0.0
    median = float(found.median())
    return median if median < FAR else float(found.min())
