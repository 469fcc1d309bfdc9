"""Hypothesis strategies for tensors: a dtype's whole range, with its edges over-represented.

A tensor costs a few draws, whatever its size: hypothesis draws a pattern, a handful of numbers and
a seed, and a torch generator fills the tensor with them. It shrinks to a constant tensor with as
few other elements as possible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.measure.at_hand import dtype_named

__all__ = ["LAYOUTS", "elements", "shapes", "tensors"]

# Memory layouts of the elements, simplest first.
LAYOUTS = ("contiguous", "offset", "transposed", "sliced", "expanded")

LARGEST_SEED = 2**32 - 1
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # of complex numbers
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def elements(
    dtype: torch.dtype | str = torch.float32,
    *,
    min_value: float | None = None,
    max_value: float | None = None,
    allow_nan: bool = False,
    allow_infinity: bool = False,
) -> SearchStrategy[Any]:
    """One element of a tensor.

    Floating-point numbers are drawn from the whole range, many of them from its edges: the limits,
    zeros, subnormals, 1 ± eps, the smallest normal number, the largest number, its square root and
    its logarithm, and float16's 65504 and 65520.

    Args:
        dtype: any floating-point, integer or boolean dtype, or its name.
        min_value: no element is smaller; by default the dtype's own limit.
        max_value: no element is larger.
        allow_nan: whether NaN is drawn.
        allow_infinity: whether infinities are drawn.

    Raises:
        FxguardError: when the dtype holds no number from min_value to max_value.
    """
    dtype = dtype_named(dtype)
    if dtype is torch.bool:
        return st.booleans()
    if not dtype.is_floating_point:
        if dtype.is_complex:
            raise UsageError("the elements of a complex tensor are drawn as pairs: use tensors()")
        info = torch.iinfo(dtype)
        least = info.min if min_value is None else math.ceil(max(min_value, info.min))
        most = info.max if max_value is None else math.floor(min(max_value, info.max))
        _check_range(dtype, least, most)
        return st.integers(least, most)
    low, high = _bounds(dtype, min_value, max_value)
    special = [math.nan] * allow_nan + [math.inf, -math.inf] * allow_infinity
    return _floats(dtype, low, high, *special)


@functools.cache  # hypothesis takes a while to examine each new strategy
def _floats(dtype: torch.dtype, low: float, high: float, *special: float) -> SearchStrategy[float]:
    drawn = _between(dtype, low, high)
    # Each is a range, because hypothesis can move from a number in a narrow range to simpler ones
    # in the wide range, but not from one that was picked from a list.
    edges = [
        _between(dtype, max(a, low), min(b, high))
        for a, b in [(low, low), (high, high), *_edges(dtype)]
        if max(a, low) <= min(b, high)
    ]
    own = [st.sampled_from(special)] if special else []
    return st.one_of(drawn, st.one_of(drawn, *edges), *own)


def _between(dtype: torch.dtype, low: float, high: float) -> SearchStrategy[float]:
    """Numbers of a dtype between two bounds."""
    widths: dict[torch.dtype, Literal[16, 32, 64]] = {torch.float64: 64, torch.float16: 16}
    drawn = st.floats(low, high, width=widths.get(dtype, 32))
    if dtype in (*widths, torch.float32):
        return drawn
    return drawn.map(lambda x: min(max(_rounded(x, dtype), low), high))


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 8
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, including scalars and empty tensors."""
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def tensors(
    draw: DrawFn,
    dtype: torch.dtype | str = torch.float32,
    shape: Sequence[int] | None = None,
    *,
    elements: SearchStrategy[Any] | None = None,
    min_value: float | None = None,
    max_value: float | None = None,
    allow_nan: bool = False,
    allow_infinity: bool = False,
    layouts: Sequence[str] = LAYOUTS,
) -> Tensor:
    """Tensors of one dtype.

    Args:
        draw: given by hypothesis.
        dtype: floating-point, complex, integer or boolean, or its name.
        shape: shape of the tensors; None for any of :func:`shapes`.
        elements: the strategy for elements; if given, the next four arguments have no effect.
        min_value: as for :func:`fxguard.testing.elements`.
        max_value: likewise.
        allow_nan: likewise.
        allow_infinity: likewise.
        layouts: the allowed memory layouts: ``"contiguous"``, ``"offset"`` (not at the beginning of
            the storage), ``"transposed"``, ``"sliced"`` (every other element of a storage),
            ``"expanded"`` (stride 0: the elements share memory and cannot be written).

    Raises:
        FxguardError: for an unknown layout, and as in :func:`fxguard.testing.elements`.

    Example:
        >>> @given(tensors(torch.float16, (4, 64), min_value=-10, max_value=10))
        ... def test_softmax(x):
        ...     assert_finite(torch.softmax, x, dim=-1)
    """
    if unknown := [layout for layout in layouts if layout not in LAYOUTS] or not layouts:
        raise UsageError(f"layouts are some of {', '.join(LAYOUTS)}; got {unknown or layouts!r}")
    dtype = dtype_named(dtype)
    given = {
        "min_value": min_value,
        "max_value": max_value,
        "allow_nan": allow_nan,
        "allow_infinity": allow_infinity,
    }
    size = draw(shapes()) if shape is None else tuple(shape)
    layout = draw(st.sampled_from(list(layouts)))
    if dtype in PARTS and elements is None:
        parts = _laid_out(draw, (*size, 2), "contiguous", PARTS[dtype], None, given)
        return _rearranged(torch.view_as_complex(parts), layout)
    return _laid_out(draw, size, layout, dtype, elements, given)


def _laid_out(
    draw: DrawFn,
    size: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    elements: SearchStrategy[Any] | None,
    given: dict[str, Any],
) -> Tensor:
    held = list(size)  # without dimensions that are expanded afterwards
    if layout == "expanded" and 0 not in size and size:
        held[draw(st.integers(0, len(size) - 1))] = 1
    values = _filled(draw, math.prod(held), dtype, elements, given).reshape(held)
    return values.expand(size) if layout == "expanded" else _rearranged(values, layout)


def _rearranged(values: Tensor, layout: str) -> Tensor:
    """The same elements in another memory layout."""
    if layout == "offset":
        memory = values.new_zeros(values.numel() + 1)
        memory[1:] = values.flatten()
        return memory[1:].view(values.shape)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and values.dim() > 0:
        memory = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
        memory[..., ::2] = values
        return memory[..., ::2]
    return values


def _filled(
    draw: DrawFn,
    count: int,
    dtype: torch.dtype,
    own: SearchStrategy[Any] | None,
    given: dict[str, Any],
) -> Tensor:
    """A given number of elements: a pattern of a few drawn numbers, and some single ones."""
    one = elements(dtype, **given) if own is None else own
    wide = torch.float64 if dtype.is_floating_point else dtype
    patterns = ["constant", "several"]
    if own is None and dtype.is_floating_point:
        patterns += ["between", "magnitudes"]
    pattern = draw(st.sampled_from(patterns)) if count > 1 else "constant"
    # Hypothesis considers fewer draws simpler, so the constant has to need the fewest.
    first = draw(one)
    values = torch.tensor([first], dtype=wide).repeat(count)
    if pattern != "constant":
        generator = torch.Generator().manual_seed(draw(st.integers(0, LARGEST_SEED)))
        if pattern == "several":
            few = torch.tensor([first, *draw(st.lists(one, min_size=1, max_size=7))], dtype=wide)
            values = few[torch.randint(len(few), (count,), generator=generator)]
        elif pattern == "between":
            share = torch.rand(count, generator=generator, dtype=wide)
            values = values * (1 - share) + draw(one) * share
        else:
            values = _any_magnitude(values, dtype, generator)
            values = values.clamp(*_bounds(dtype, given["min_value"], given["max_value"]))
    if count > 1:
        single = st.tuples(st.integers(0, count - 1), one)
        for position, value in draw(st.lists(single, max_size=4)):
            values[position] = value
    return values.to(dtype)


def _any_magnitude(largest: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers of either sign with evenly spread logarithms, from subnormal numbers on."""
    share = torch.rand(largest.shape, generator=generator, dtype=torch.float64)
    signs = torch.randint(2, largest.shape, generator=generator) * 2 - 1
    bits = (largest.abs() / _smallest(dtype)).log2().clamp(min=0)
    return signs * largest * torch.exp2(-bits * share)


def _edges(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Narrow ranges of numbers at which something happens."""
    info = torch.finfo(dtype)
    largest, tiny = info.max, info.smallest_normal
    found = [(_next(x, -1, dtype), _next(x, 1, dtype)) for x in (0.0, 1.0, tiny)]
    found += [(_next(largest, -1, dtype), largest), (_smallest(dtype), _smallest(dtype))]
    # From here on a square and an exponential overflow, and casts to float16 do.
    for x in (math.sqrt(largest), math.log(largest)):
        found.append((_rounded(x, dtype), _next(_rounded(x, dtype), 1, dtype)))
    if largest > 65520:
        found += [(_rounded(x, dtype), _rounded(x, dtype)) for x in (65504.0, 65519.0, 65520.0)]
    return [pair for a, b in found for pair in ((a, b), (-b, -a))]


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _bounds(
    dtype: torch.dtype, min_value: float | None, max_value: float | None
) -> tuple[float, float]:
    """The smallest and the largest number of a dtype within limits."""
    largest = torch.finfo(dtype).max
    low = -largest if min_value is None else max(float(min_value), -largest)
    high = largest if max_value is None else min(float(max_value), largest)
    _check_range(dtype, low, high)
    inner = [_rounded(low, dtype), _rounded(high, dtype)]
    if inner[0] < low:
        inner[0] = _next(inner[0], 1, dtype)
    if inner[1] > high:
        inner[1] = _next(inner[1], -1, dtype)
    _check_range(dtype, *inner)
    return inner[0], inner[1]


def _check_range(dtype: torch.dtype, low: float, high: float) -> None:
    if not low <= high:
        raise UsageError(f"{dtype} holds no number from min_value to max_value")


def _next(x: float, direction: int, dtype: torch.dtype) -> float:
    """The next number of a dtype, up (1) or down (-1)."""
    if x == 0:
        return direction * _smallest(dtype)
    value = torch.tensor([x], dtype=torch.float64).to(dtype)
    bits = value.view(INTEGERS[value.element_size()])
    return float((bits + (direction if x > 0 else -direction)).view(dtype)[0].double())


def _rounded(x: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(dtype).double())
