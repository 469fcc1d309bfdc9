"""How far apart two results are, in two forms or in two runs: only by roundings, or by more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.tables import UNINITIALISED
from fxguard.graph.wide_form import is_float
from fxguard.measure.func_levels import without_levels
from fxguard.plan.plan import Plan
from fxguard.records import Role

__all__ = [
    "TOLERANCE",
    "Difference",
    "are_close",
    "are_equal",
    "comparable",
    "difference_of",
    "real_numbers",
    "relative_error",
    "relative_to",
    "same_magnitude",
]

# In units of eps: allowed differences of outputs, and of two ways to compute one element.
ROUNDINGS, ROUNDINGS_OF_ONE = 16, 8

# How far apart the largest magnitudes of the two runs may be: compilers keep more digits between
# fused operations. Different random numbers differ by more.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Difference:
    """How an output of the model would be different."""

    error: float  # the largest, relative to the largest magnitude; inf if one is infinite
    # Where it is largest: the index, the model's number, and what it would have been. None if these
    # are not floating-point numbers.
    index: tuple[int, ...] | None = None
    given: float | None = None
    wanted: float | None = None


def difference_of(low: Any, other: Any) -> Difference | None:
    """How far an output is from what it would be; None if only by roundings.

    Roundings are 16 eps of the dtype, relative to the largest magnitude, or less than its smallest
    normal number.
    """
    if not isinstance(low, Tensor):
        return None if low == other else Difference(1.0)
    if low.shape != other.shape:
        return Difference(1.0)
    other = other.to(low.dtype)  # values that do not fit become infinite
    if not is_float(low):
        return None if torch.equal(low, other) else Difference(1.0)
    differs = ~are_equal(low, other)
    if not bool(differs.any()):
        return None
    apart = _gap(low, other).where(differs, 0)
    apart = apart.where(apart.isfinite() | ~low.isfinite(), math.inf)  # finite only in the model
    apart = apart.where(low.isfinite(), 0)
    index = torch.unravel_index(apart.argmax(), apart.shape)
    gap, scale = float(apart[index]), max(_largest(low), _largest(other))
    info = torch.finfo(low.dtype)
    if gap <= max(ROUNDINGS * info.eps * scale, info.smallest_normal):
        return None
    given, wanted = (None, None) if low.is_complex() else (float(low[index]), float(other[index]))
    return Difference(gap / scale, tuple(map(int, index)), given, wanted)


def relative_error(low: Tensor, high: Tensor, size: float = 0.0) -> float:
    """``max |low - high| / max |high|`` where ``high`` is finite; inf if ``low`` is not there.

    Args:
        low: the result in the model's dtype.
        high: the result in the reference.
        size: a scale for the difference, used if it is larger.
    """
    if not is_float(low) or not low.numel():
        return 0.0
    low, high = real_numbers(low), real_numbers(high)
    finite = high.isfinite()
    low, high = low.to(high.dtype)[finite], high[finite]
    if not bool(low.isfinite().all()):
        return math.inf
    if not high.numel():
        return 0.0
    return relative_to(float((low - high).abs().amax()), max(size, float(high.abs().amax())))


def relative_to(gap: float, size: float) -> float:
    """A difference relative to a size: 1 if the size is 0 and the difference is not."""
    if not gap or math.isinf(gap):
        return gap
    return gap / size if size else 1.0


def real_numbers(x: Tensor) -> Tensor:
    """The elements of a tensor as a dense one; complex numbers as pairs."""
    x = without_levels(x).detach()
    if x.is_quantized:
        return x.dequantize()
    x = x if x.layout is torch.strided else x.to_dense()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def are_equal(low: Tensor, other: Tensor) -> Tensor:
    """Elements that are equal, counting NaN as equal to NaN."""
    return (low == other) | (low.isnan() & other.isnan())


def are_close(low: Tensor, other: Tensor) -> Tensor:
    """Elements that are equal, or differ by roundings of different ways to compute them."""
    size = low.abs().to(torch.float64) * ROUNDINGS_OF_ONE + _largest(low)
    gap = _gap(low, other)
    return are_equal(low, other) | (gap <= torch.finfo(low.dtype).eps * size)


def _gap(low: Tensor, other: Tensor) -> Tensor:
    """How far elements are apart, in float64; of complex numbers, the modulus."""
    wide = torch.complex128 if low.is_complex() else torch.float64
    return (other.to(wide) - low.to(wide)).abs()


def _largest(value: Tensor) -> float:
    finite = value.detach()[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def comparable(plan: Plan) -> set[int]:
    """The rows of a graph's statistics that a second run has to repeat.

    These are what the graph makes. Integers are left out, inputs, because a cache that the graph
    wrote has changed, and memory that nobody has written.
    """
    unwritten = {value for s in plan.steps if s.kind in UNINITIALISED for value in s.outputs}
    return {
        value.slot
        for index, value in enumerate(plan.values)
        if value.slot is not None
        and value.can_be_bad
        and value.role is Role.MADE
        and index not in unwritten
    }


def same_magnitude(one: float, other: float) -> bool:
    """Whether the largest magnitudes of two runs come from the same computation."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-30)
    return str(one) == str(other)
