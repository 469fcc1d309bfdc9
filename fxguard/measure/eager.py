"""The magnitude ranges of tensors in memory, as fast as memory can be read.

:mod:`fxguard.measure.native`, if it is built, reads tensors in CPU memory, and
:mod:`fxguard.measure.gpu` those on a GPU. For all others, this module compares bits: the bits of
non-negative floating-point numbers, read as integers, have the same order as the numbers, with inf
above all finite numbers and NaN above inf. Comparing integers costs half as much as comparing
floating-point numbers, which need a check for NaN at each step. The results equal those of
:mod:`fxguard.measure.traceable`; no compiler can trace this module.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import gpu, native, traceable
from fxguard.measure.at_hand import flattened
from fxguard.measure.native import is_observed

__all__ = [
    "ROW",
    "Numbers",
    "Pair",
    "abs_min_max",
    "are_finite",
    "as_tensor",
    "collect",
    "gathered",
    "is_observed",
    "otherwise",
    "read",
    "waited_for",
]

# The integers that hold the bits.
INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

SMALL = 2**13  # elements: up to this number, calls take longer than the comparison
LARGE = 2**16  # elements: from this number on, looking at a few first costs little

# Pieces of memory as large as those of the model are available already, and in the cache. Larger
# pieces come fresh from the system, page by page, which takes longer than reading them. Tensors of
# at least this size are read block by block, into memory that is kept.
HUGE = 2**24  # bytes
BLOCK = 2**20  # bytes of one block: about a core's second-level cache

_PLAIN = (Tensor, torch.nn.Parameter)
_local = threading.local()

Pair = tuple[float, float] | traceable.Pair | gpu.Row

# The results of many checks: two doubles each, or a tensor of shape [checks, 2].
Numbers = bytearray | Tensor
ROW = 16  # bytes of two doubles


def abs_min_max(value: Any) -> Pair:
    """The smallest and the largest magnitude in ``value``.

    :mod:`fxguard.measure.native` reads tensors in CPU memory. If it is not built, dense
    floating-point tensors are read as integers. All others go to
    :func:`fxguard.measure.traceable.abs_min_max`.

    Returns:
        Two numbers, or two tensors of shape ``[]`` from that function. If there is a NaN, the first
        may be the smallest magnitude of the other elements. ``NO_DATA`` if the value cannot be
        measured: a healthy model must not raise because a tensor supports few operations.
    """
    found = read(value)
    return otherwise(value) if found is None else found


def otherwise(value: Any) -> traceable.Pair | gpu.Row:
    """The same of a value that C cannot read."""
    try:
        return _abs_min_max(value)
    except theirs():  # a tensor with few operations
        return traceable.mark(traceable.NO_DATA)


def read(value: Any) -> tuple[float, float] | None:
    """The same in C, for a value that C can read and nobody observes; else None."""
    return None if is_observed() else native.abs_min_max(value)


def _abs_min_max(value: Any) -> traceable.Pair | gpu.Row:
    if not is_observed() and (pair := gpu.abs_min_max(value)) is not None:
        return pair
    if (
        type(value) not in _PLAIN
        or not value.is_cpu
        or value.dtype not in INTEGERS
        or value.layout is not torch.strided
        or value.is_nested
        or not (size := value.numel())
    ):
        return traceable.abs_min_max(value)
    if value.requires_grad:
        value = value.detach()
    if size <= SMALL:
        return torch.aminmax(value.abs())  # type: ignore[return-value] # a named tuple
    if is_observed():
        return traceable.abs_min_max(value)
    dtype = value.dtype
    low, high = _extreme_bits(value, size, INTEGERS[dtype])
    return low.view(dtype), high.view(dtype)


def _extreme_bits(value: Tensor, size: int, integer: torch.dtype) -> traceable.Pair:
    flat = flattened(value) if size > LARGE else None
    if flat is None:
        return torch.aminmax(value.abs().view(integer))  # type: ignore[return-value]
    bits = flat.view(integer)
    if _looks_positive(bits):
        low, high = torch.aminmax(bits)
        if low.item() >= 0:
            return low, high
    if size * flat.element_size() > HUGE:
        return _by_blocks(flat, integer)
    return torch.aminmax(flat.abs().view(integer))  # type: ignore[return-value]


def _looks_positive(bits: Tensor) -> bool:
    """Whether the first elements have no sign, as in probabilities, squares and ReLUs.

    Then the elements may be magnitudes already.
    """
    return bool(bits[:16].amin() >= 0)


def _by_blocks(flat: Tensor, integer: torch.dtype) -> tuple[Tensor, Tensor]:
    length = BLOCK * torch.get_num_threads() // flat.element_size()
    scratch = _scratch(flat.dtype, length)
    lows, highs = [], []
    for block in flat.split(length):
        magnitudes = scratch if len(block) == length else scratch[: len(block)]
        torch.abs(block, out=magnitudes)
        low, high = torch.aminmax(magnitudes.view(integer))
        lows.append(low)
        highs.append(high)
    return torch.stack(lows).amin(), torch.stack(highs).amax()


def _scratch(dtype: torch.dtype, length: int) -> Tensor:
    """Memory for the magnitudes of one block, reused within a thread."""
    kept: dict[torch.dtype, Tensor] = _local.__dict__.setdefault("scratch", {})
    if dtype not in kept or len(kept[dtype]) != length:
        with torch.inference_mode(False):  # it is written outside that mode later
            kept[dtype] = torch.empty(length, dtype=dtype)
    return kept[dtype]


def waited_for(pair: Pair) -> tuple[float, float]:
    """The two numbers, once the device has written them."""
    if type(pair) is gpu.Row:
        low, high = pair.numbers[pair.index].tolist()
    else:
        low, high = map(float, pair)
    return low, high


def collect(items: Sequence[Pair | Tensor]) -> Tensor:
    """Join the results of many checks, as :func:`fxguard.measure.traceable.collect` does.

    Python numbers make a float64 tensor.
    """
    return as_tensor(gathered(items))


def gathered(items: Sequence[Pair | Tensor]) -> Numbers:
    """The results without a new tensor: making one takes longer than reading a small one."""
    numbers = native.packed(items)
    return _collected(items) if numbers is None else numbers


def as_tensor(numbers: Numbers) -> Tensor:
    """The result of :func:`gathered` as a tensor."""
    if isinstance(numbers, Tensor):
        return numbers
    if not numbers:
        return torch.empty((0, 2), dtype=torch.float64)
    return torch.frombuffer(numbers, dtype=torch.float64).view(-1, 2)


def are_finite(numbers: Numbers) -> bool:
    """Whether no magnitude that was gathered is NaN or inf."""
    if not isinstance(numbers, Tensor):
        return native.all_finite(numbers)
    found = read(numbers)
    return bool(torch.isfinite(numbers).all()) if found is None else math.isfinite(found[1])


def _collected(items: Sequence[Pair | Tensor]) -> Tensor:
    blocks: list[Tensor] = []
    for kind, group in itertools.groupby(items, _kind_of):
        part: Any = list(group)
        if kind is float:
            blocks.append(torch.tensor(part, dtype=torch.float64, device="cpu"))
        elif kind is gpu.Row:
            blocks += gpu.joined(part)
        else:
            blocks.append(_joined(part))
    return blocks[0] if len(blocks) == 1 else traceable.collect(blocks)


def _kind_of(item: Pair | Tensor) -> type:
    """Which of the results it is: numbers, a row on a GPU, or tensors."""
    if type(item) is tuple and type(item[0]) is float:
        return float
    return gpu.Row if type(item) is gpu.Row else Tensor


def _joined(items: Sequence[traceable.Pair | Tensor]) -> Tensor:
    numbers: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            return traceable.collect(items)
        numbers += item
    if not all(number.is_cpu for number in numbers):
        return traceable.collect(items)
    joined = torch.stack(numbers)  # in a dtype that holds all of them
    wide = torch.float64 if joined.dtype is torch.float64 else torch.float32
    return joined.to(wide).view(-1, 2)
