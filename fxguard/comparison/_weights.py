"""How a weight of one model differs from the same weight of another: negated, permuted, scaled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from fxguard.comparison._rounding import in_double, size_of
from fxguard.comparison.elements import Compared

__all__ = ["difference_between", "weights_apart"]

# A factor is named if all elements agree with it this well, relative to the largest magnitude, in
# eps.
OF_FACTOR = 2


def weights_apart(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], told: Collection[str]
) -> Iterator[Compared]:
    """Differing weights that no operation was blamed for: their readers were not compared.

    Args:
        a: weights of the first model, by name.
        b: those of the second one.
        told: names of weights that operations were blamed for.
    """
    for name, weight in a.items():
        other = b.get(name)
        if name in told or other is None or other is weight:
            continue
        if difference := difference_between(weight.detach(), other.detach()):
            said = f"{name}: {difference}"
            reason = f"a weight differs: {said}; no operation that was compared reads it"
            yield Compared(name, "weight", reason=reason, weights=(said,))


def difference_between(a: Tensor, b: Tensor) -> str:
    """How a weight differs from another one; "" if one rounding of each explains it.

    Both are rounded to the coarser of their dtypes. An element may still be off by one unit in the
    last place, because a weight may have been rounded twice.

    Args:
        a: weight of the first model.
        b: weight of the second model.

    Example:
        >>> difference_between(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]))
        'negated'
    """
    if a.shape != b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    if not a.is_floating_point() or not b.is_floating_point():
        return "" if torch.equal(a, b.to(a.device)) else _count(in_double(a) != in_double(b))
    dtype = max((a.dtype, b.dtype), key=lambda each: torch.finfo(each).eps)
    eps = torch.finfo(dtype).eps
    lost = a.isfinite() != b.to(a.device).isfinite()
    if bool(lost.any()):
        return f"{int(lost.sum())} of {lost.numel()} elements are finite in one model only"
    a, b = in_double(a.to(dtype)), in_double(b.to(dtype).to(a.device))
    differs = _differs(a, b, eps)
    if not bool(differs.any()):
        return ""
    if not bool(_differs(a, -b, eps).any()):
        return "negated"
    factor = _factor(a, b, eps)
    if factor is not None:
        return f"scaled by {factor:.6g}"
    if bool(differs.sum() > 1) and torch.equal(*(x.flatten().sort().values for x in (a, b))):
        return _permuted(a, b)
    return _count(differs)


def _differs(a: Tensor, b: Tensor, eps: float) -> Tensor:
    size = torch.maximum(a.abs(), b.abs())
    same = (a == b) | (a.isnan() & b.isnan())
    return ~same & ~(((a - b).abs() <= eps * size) & size.isfinite())


def _factor(a: Tensor, b: Tensor, eps: float) -> float | None:
    """The one factor between A's elements and B's, if there is one."""
    scale = size_of(a)
    if not scale or not bool(a.isfinite().all() & b.isfinite().all()):
        return None
    x, y = a.flatten() / scale, b.flatten() / scale
    factor = float(x @ y) / float(x @ x)
    fits = (y - factor * x).abs() <= OF_FACTOR * eps * abs(factor) * x.abs()
    return factor if factor and a.numel() > 1 and bool(fits.all()) else None


def _permuted(a: Tensor, b: Tensor) -> str:
    for axis in range(a.dim()):
        for shift in range(1, min(a.shape[axis], 64)):
            if torch.equal(a.roll(shift, axis), b):
                return f"rolled by {shift} along axis {axis}"
        if torch.equal(a.flip(axis), b):
            return f"flipped along axis {axis}"
    return "permuted: the same elements in another order"


def _count(differs: Tensor) -> str:
    return f"{int(differs.sum())} of {differs.numel()} elements differ"
