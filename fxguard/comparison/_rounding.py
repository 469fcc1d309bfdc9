"""How far apart two results are, and how much of it the roundings of their dtypes explain."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxguard.comparison.elements import Apart
from fxguard.graph.wide_form import is_float
from fxguard.rerun.differences import real_numbers, relative_error, relative_to

__all__ = [
    "apart",
    "are_one_program",
    "beyond",
    "distance_of",
    "error_of",
    "is_same",
    "share_of_rounding",
    "unit_of",
]

# How many roundings of its result and of each operand a kernel may be away from float64.
ROUNDINGS = 16
# What two programs may differ by in float64, relative to the largest magnitude: 2^-40.
SAME_PROGRAM = 2.0**-40
# How many roundings of a weight that was computed from others are explained.
OF_WEIGHTS = 8
# In roundings of A, where operations that only A has rounded the operands of A's operation.
UNALIGNED = 64
# Vector kernels flush what is below the smallest normal number of float32.
FLUSHED = 2.0**-126


def unit_of(*tensors: Tensor) -> float:
    """The largest relative error of one rounding in the coarsest dtype of some tensors."""
    return max((torch.finfo(x.dtype).eps / 2 for x in tensors if is_float(x)), default=0.0)


def rms_of(x: Tensor) -> float:
    """The root mean square of the finite elements, whatever their size."""
    size = size_of(x)
    if not size or not math.isfinite(size):
        return 0.0
    return size * float((x.abs().where(x.isfinite(), 0.0) / size).square().mean().sqrt())


def distance_of(a: Tensor, b: Tensor) -> float:
    """The root mean square of ``b - a``, relative to that of ``a``; inf if one alone is finite.

    Of integers and booleans: the share of those that differ.
    """
    if not a.numel():
        return 0.0
    if not is_float(a) or not is_float(b):
        return float((in_double(a) != in_double(b)).double().mean())
    a, b = in_double(a), in_double(b)
    gap = gap_of(a, b)
    if bool(gap.isinf().any()):
        return math.inf
    apart_by, size = rms_of(gap), rms_of(a)
    return apart_by / size if size else (math.inf if apart_by else 0.0)


def are_one_program(a: Tensor, b: Tensor, unit: float, moved: Tensor | float = 0.0) -> bool:
    """Whether two results in float64 are one but for numbers that were rounded before.

    Args:
        a: what one program makes in float64.
        b: what the other one makes of the same inputs and weights.
        unit: how far numbers in the programs may have been rounded.
        moved: how far elements move with roundings of weights that only one of the two has.
    """
    if a.shape != b.shape:
        return False
    if not is_float(a) or not is_float(b):
        return bool(torch.equal(in_double(a), in_double(b)))
    a, b = in_double(a), in_double(b)
    allowed = unit * (a.abs() + rms_of(a)) + SAME_PROGRAM * size_of(a) + OF_WEIGHTS * moved
    return not bool((gap_of(a, b) > allowed).any())


def is_same(a: Tensor, b: Tensor) -> bool:
    """``torch.equal``, which has no kernel for complex numbers of two halves."""
    if a.dtype == b.dtype == torch.complex32:
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    return torch.equal(a, b)


def in_double(x: Tensor) -> Tensor:
    """A tensor in float64; complex numbers as pairs."""
    return real_numbers(x).to(torch.float64)


def gap_of(a: Tensor, b: Tensor) -> Tensor:
    """``|a - b|``: 0 if both are the same inf or NaN, inf if only one is finite."""
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs()
    return gap.where(gap.isfinite(), math.inf).where(~same, 0.0)


def size_of(x: Tensor) -> float:
    """The largest finite magnitude."""
    return float(x.abs().where(x.isfinite(), 0.0).max()) if x.numel() else 0.0


def apart(a: Tensor, b: Tensor) -> Apart:
    """How far ``b`` is from ``a``; both have one shape."""
    if not a.numel():
        return Apart(0.0, 0.0)
    if a is b:
        return Apart(0.0, 0.0, 1.0)
    a, b = in_double(a), in_double(b)
    largest = float(gap_of(a, b).max())
    size = size_of(a)
    return Apart(largest, relative_to(largest, size), _cosine(a, b))


def _cosine(a: Tensor, b: Tensor) -> float | None:
    scale = size_of(a), size_of(b)
    if not all(scale) or not bool(a.isfinite().all() & b.isfinite().all()):
        return None
    a, b = a.flatten() / scale[0], b.flatten() / scale[1]
    found = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, found))


def error_of(low: Tensor, wide: Tensor) -> float:
    """The largest error of a result, relative to the largest magnitude of the same in float64.

    It is also inf where float64 has an infinity or NaN and the result has something else.
    """
    high = in_double(wide)
    if bool((gap_of(high, in_double(low)).isinf() & ~high.isfinite()).any()):
        return math.inf
    return relative_error(low, wide)


def share_of_rounding(
    low: Tensor,
    wide: Tensor,
    unit: float,
    *,
    moved: Tensor | None = None,
    inside: Tensor | None = None,
) -> float:
    """The error of a result as a multiple of what roundings explain: more than 1 is too much.

    An element may be off by roundings of itself, and by the effect of roundings of its operands:
    how far that element moves in float64, and how far elements move on average. An infinity counts
    as an error, also for a number beyond the dtype's largest one.

    Args:
        low: the result in the dtype of the model.
        wide: the same result in float64.
        unit: the relative error of one rounding.
        moved: how far elements move with their operands; None if they do not.
        inside: numbers that the kernel rounds on the way to each element, if they may be larger.
    """
    if not low.numel():
        return 0.0
    info = torch.finfo(low.dtype)
    low, wide = in_double(low), in_double(wide)
    smallest = max(info.smallest_normal * info.eps, FLUSHED)
    allowed = unit * wide.abs() + smallest
    if moved is not None and moved.numel():
        moved = in_double(moved).reshape(wide.shape)
        allowed = allowed + moved + float(moved.square().mean().sqrt())
    if inside is not None and inside.shape == wide.shape:
        allowed = allowed + unit * in_double(inside).abs()
    gap = gap_of(wide, low)
    return float((gap / (ROUNDINGS * allowed)).nan_to_num(0.0, posinf=math.inf).max())


def beyond(a: Tensor, b: Tensor, unit: float, *, rounded: float = 0.0) -> bool:
    """Whether two programs differ in float64 by more than one rounding of the coarser dtype.

    Args:
        a: the result of one program.
        b: the result of the other one on the same operands.
        unit: the relative error of one rounding of the coarser dtype.
        rounded: the same for A's dtype, if operations that only A has rounded the operands.
    """
    a, b = in_double(a), in_double(b)
    allowed = unit * a.abs() + (SAME_PROGRAM + UNALIGNED * rounded) * size_of(a)
    return bool((gap_of(a, b) > allowed).any())
