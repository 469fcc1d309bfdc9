"""The magnitude range of one tensor, computed eagerly or inside a traced graph.

Everything in this file is ordinary tensor arithmetic without side effects, so that
AOTAutograd and Inductor can trace, fuse and keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.records import NOT_MEASURED, Range
from fxguard.torch_names import is_traceable_wrapper_subclass

__all__ = [
    "abs_min_max",
    "collect",
    "decode",
    "has_numbers",
    "mark",
    "numbers",
    "reducible",
]

# Reasons in place of a number in the abs-max column, since magnitudes are never negative.
EMPTY = -1.0
NOT_A_TENSOR = -2.0
NO_DATA = -3.0
NOT_RUN = -4.0

NOTES = {
    EMPTY: "empty",
    NOT_A_TENSOR: "not a tensor",
    NO_DATA: NOT_MEASURED,
    NOT_RUN: "not run",
}

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

# These lack abs or overflow in it. float32 has the range of all of them, and the digits of most:
# integers above 2**24 are rounded.
CONVERTED = {
    dtype: to
    for name, to in {
        "bool": torch.float32,
        "uint8": torch.float32,
        "int8": torch.float32,
        "uint16": torch.float32,
        "int16": torch.float32,
        "uint32": torch.float32,
        "int32": torch.float32,
        "uint64": torch.float32,
        "int64": torch.float32,
        "complex32": torch.complex64,
        "float8_e4m3fn": torch.float32,
        "float8_e4m3fnuz": torch.float32,
        "float8_e5m2": torch.float32,
        "float8_e5m2fnuz": torch.float32,
        "float8_e8m0fnu": torch.float32,
        "qint8": torch.float32,
        "quint8": torch.float32,
        "qint32": torch.float32,
    }.items()
    if (dtype := getattr(torch, name, None)) is not None
}

SPARSE_ROWS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

Pair = tuple[Tensor, Tensor]

CPU = torch.device("cpu")


def has_numbers(value: Tensor) -> bool:
    """Whether a tensor has data of a numeric dtype."""
    return not value.is_meta and value.dtype in (*FLOATS, *COMPLEX, *CONVERTED)


def inside(value: Tensor) -> list[Tensor]:
    """The tensors inside a wrapper subclass; empty for any other tensor.

    For a DTensor, that is the part on this rank: asking for the whole tensor would communicate.
    """
    if type(value) is Tensor or type(value) is torch.nn.Parameter:  # true for nearly all tensors
        return []
    if value.is_nested or hasattr(value, "trigger_wait"):  # AsyncCollectiveTensor waits by itself
        return []
    if not is_traceable_wrapper_subclass(value):
        return []
    names, _ = value.__tensor_flatten__()
    return [part for name in names if isinstance(part := getattr(value, name), Tensor)]


def numbers(value: Tensor) -> Tensor:
    """The stored elements of ``value`` as a dense floating or complex tensor, without gradient."""
    value = value.detach()
    if value.is_quantized:
        value = value.dequantize()
    elif (
        value.is_nested
        and value.layout is torch.jagged
        and getattr(value, "_lengths", None) is not None
    ):
        value = torch.cat([part.reshape(-1) for part in value.unbind()])  # it has holes
    elif value.is_nested or value.layout in SPARSE_ROWS:
        value = value.values()
        if value.is_complex():  # a view of its parts would need strides of the whole tensor
            value = value.clone()
    elif value.layout is torch.sparse_coo:
        value = value._values()
    elif value.layout is not torch.strided:
        value = value.to_dense()
    return value.to(CONVERTED.get(value.dtype, value.dtype))


def magnitudes(dense: Tensor) -> Tensor:
    """Elementwise magnitudes; for complex numbers, the modulus.

    The modulus of a finite complex number can overflow, and that of ``inf + nan j`` is inf. In
    these cases the larger magnitude of the two parts is used, which is finite or NaN.
    """
    size = dense.abs()
    if dense.is_complex():
        parts = torch.view_as_real(dense.resolve_conj()).abs().amax(dim=-1)
        size = torch.where(torch.isfinite(size), size, parts)
    return size


def abs_min_max(value: Any) -> Pair:
    """The smallest and the largest magnitude in ``value``.

    Args:
        value: a tensor of any dtype, layout and shape. Tuples and lists of tensors give
            the range of all of them together; anything else gives "not a tensor".

    Returns:
        Two tensors of shape ``[]``. Both are NaN if any element is NaN, and the second is negative
        (``EMPTY``, ``NOT_A_TENSOR``, ``NO_DATA``) if there is no number.
    """
    magnitude = reducible(value)
    if magnitude is not None:
        low, high = torch.aminmax(magnitude)
        return low, high
    if isinstance(value, (tuple, list)):
        return _combine([abs_min_max(item) for item in value if isinstance(item, CONTAINERS)])
    if not isinstance(value, Tensor):
        return mark(NOT_A_TENSOR)
    if parts := inside(value):
        return _combine([abs_min_max(part) for part in parts])
    if not has_numbers(value):
        return mark(NO_DATA)
    magnitude = magnitudes(numbers(value))
    if _known_only_at_run_time(magnitude.numel()):
        return _of_any_size(magnitude)
    return mark(EMPTY, magnitude.device)


def reducible(value: Any) -> Tensor | None:
    """The magnitudes in a tensor that is known to have elements, else None."""
    if not isinstance(value, Tensor) or inside(value) or not has_numbers(value):
        return None
    magnitude = magnitudes(numbers(value))
    size = magnitude.numel()
    return None if _known_only_at_run_time(size) or size == 0 else magnitude


CONTAINERS = (Tensor, tuple, list)


def _known_only_at_run_time(size: Any) -> bool:
    # Evaluating `size == 0` for a symbol would end the trace with a data-dependent error.
    if not isinstance(size, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return has_free_unbacked_symbols(size)


def _of_any_size(magnitude: Tensor) -> Pair:
    # One extra element on each side defines the reductions even without elements; for an empty
    # tensor the maximum is then EMPTY.
    flat = magnitude.reshape(-1)
    low = torch.cat([flat, flat.new_full((1,), math.inf)]).amin()
    high = torch.cat([flat, flat.new_full((1,), EMPTY)]).amax()
    return low, high


def _combine(pairs: Sequence[Pair]) -> Pair:
    if not pairs:
        return mark(NOT_A_TENSOR)
    if len(pairs) == 1:
        return pairs[0]
    lows = torch.stack([low.to(torch.float64) for low, _ in pairs])
    highs = torch.stack([high.to(torch.float64) for _, high in pairs])
    absent = highs < 0  # a reason in place of a number
    high = highs.amax()
    return torch.where(high < 0, high, torch.where(absent, math.inf, lows).amin()), high


def mark(reason: float, device: torch.device = CPU) -> Pair:
    """A pair in place of two numbers, holding the reason."""
    value = torch.full((), reason, dtype=torch.float32, device=device)
    return value, value


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Pairs of numbers, shape [] each, as a tensor of shape ``[pairs, 2]``."""
    wide = common_dtype(numbers)
    numbers = _on_one_device(numbers)
    if all(x.dtype == numbers[0].dtype for x in numbers):
        return torch.stack(list(numbers)).view(-1, 2).to(wide)
    return torch.stack([x.to(wide) for x in numbers]).view(-1, 2)


def collect(
    items: Sequence[Pair | Tensor], join: Callable[[Sequence[Tensor]], Tensor] = stacked
) -> Tensor:
    """Join the results of many checks, in order.

    Args:
        items: results of :func:`abs_min_max`, and statistics of the bodies of higher-order
            operations, shape ``[count, 2]``.
        join: joins the former.

    Returns:
        A tensor of shape ``[rows, 2]`` on the device of :func:`common_device`, float64 if any value
        is, else float32. The columns are abs min and abs max.
    """
    blocks: list[Tensor] = []
    flat: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            blocks += [join(flat)] if flat else []
            blocks.append(item)
            flat = []
        else:
            flat += item
    blocks += [join(flat)] if flat else []
    if not blocks:
        return torch.empty((0, 2))
    wide = common_dtype(blocks)
    blocks = [x.to(wide) for x in _on_one_device(blocks)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that can hold the numbers of all tensors."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device for joining: that of the first tensor that is not on the CPU, else the CPU."""
    device = tensors[0].device
    if all(x.device == device for x in tensors):
        return device
    return next((x.device for x in tensors if x.device.type != "cpu"), device)


def _on_one_device(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    device = common_device(tensors)
    if any(x.device != device for x in tensors):
        return [x.to(device, non_blocking=True) for x in tensors]
    return tensors


def decode(low: float, high: float) -> Range | str:
    """A row of collected numbers as a :class:`Range`, or the reason why there is none."""
    if high in NOTES:
        return NOTES[high]
    return Range(high, high) if math.isnan(high) else Range(low, high)
