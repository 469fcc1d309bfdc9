"""The magnitude ranges of tensors that are at hand, as fast as the memory can be read.

The bits of a non-negative floating-point number, read as an integer, are in the order of the
numbers, with inf above all finite numbers and NaN above inf. To compare integers costs half of
what comparing floating-point numbers costs, which have to look for NaN at each step. What is
measured here is what :mod:`fxguard.stats` measures; nothing here can be traced by a compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard import stats

__all__ = ["Bits", "abs_min_max", "collect"]

# The integers that hold the bits.
INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

LARGE = 2**16  # elements from which on a second look at some of them costs little

# Memory of a size that the model uses itself is there already, and in the cache. Larger pieces come
# fresh from the system, page by page, which takes longer than to read them: from here on a tensor
# is read block by block, in memory that is kept.
HUGE = 2**24  # bytes
BLOCK = 2**20  # bytes of one block: about a core's second-level cache

# The bits of the smallest and of the largest magnitude, shape [] each, and whose bits they are.
Bits = tuple[Tensor, Tensor, torch.dtype]

_PLAIN = (Tensor, torch.nn.Parameter)
_local = threading.local()


def abs_min_max(value: Any) -> Bits | stats.Pair:
    """The smallest and the largest magnitude in ``value``, for :func:`collect`.

    Dense floating-point tensors on the CPU are read as integers, all others are given to
    :func:`fxguard.stats.abs_min_max`.
    """
    if (
        type(value) not in _PLAIN
        or not value.is_cpu
        or value.dtype not in INTEGERS
        or value.layout is not torch.strided
        or value.is_nested
        or not (size := value.numel())
        or _is_observed()
    ):
        return stats.abs_min_max(value)
    dtype = value.dtype
    integer = INTEGERS[dtype]
    if value.requires_grad:
        value = value.detach()
    flat = _flat(value) if size > LARGE else None
    if flat is None:
        low, high = torch.aminmax(value.abs().view(integer))
        return low, high, dtype
    bits = flat.view(integer)
    if _looks_positive(bits):
        low, high = torch.aminmax(bits)
        if low.item() >= 0:
            return low, high, dtype
    if size * flat.element_size() > HUGE:
        low, high = _by_blocks(flat, integer)
    else:
        low, high = torch.aminmax(flat.abs().view(integer))
    return low, high, dtype


def _looks_positive(bits: Tensor) -> bool:
    """Whether the first elements have no sign, as all probabilities, squares and ReLUs have.

    Then the magnitudes are there already and need not be made.
    """
    return bool(bits[:16].amin() >= 0)


def _is_observed() -> bool:
    """Whether somebody may be tracing what runs here, or batching or differentiating it."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _flat(value: Tensor) -> Tensor | None:
    """The elements in the order in which they are stored, None where there are gaps between them.

    A dimension along which a tensor is expanded repeats the same elements.
    """
    if value.is_contiguous():
        return value.view(-1)
    count = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride != count:
                return None
            count *= size
    return value.as_strided((count,), (1,))


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
    """Memory for the magnitudes of one block, the same one each time in one thread."""
    kept: dict[torch.dtype, Tensor] = _local.__dict__.setdefault("scratch", {})
    if dtype not in kept or len(kept[dtype]) != length:
        with torch.inference_mode(False):  # it is written outside of it later
            kept[dtype] = torch.empty(length, dtype=dtype)
    return kept[dtype]


def collect(items: Sequence[Bits | stats.Pair | Tensor]) -> Tensor:
    """Join the results of many checks, in order, as :func:`fxguard.stats.collect` does.

    Args:
        items: results of :func:`abs_min_max`, and statistics of the bodies of higher-order
            operations, shape ``[count, 2]``.

    Returns:
        A tensor of shape ``[rows, 2]``. Where there is a NaN the second column has it, and the
        first the smallest magnitude of the others.
    """
    groups: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    others: list[stats.Pair | Tensor] = []
    other_rows: list[int] = []
    row = 0
    for item in items:
        if isinstance(item, tuple) and len(item) == 3:
            low, high, dtype = item
            if dtype not in groups:
                groups[dtype] = [], []
            scalars, rows = groups[dtype]
            scalars += (low, high)
            rows.append(row)
            row += 1
        else:
            count = len(item) if isinstance(item, Tensor) else 1
            others.append(item)
            other_rows += range(row, row + count)
            row += count
    parts = [(_numbers(scalars, dtype), rows) for dtype, (scalars, rows) in groups.items()]
    if others or not parts:
        parts.append((stats.collect(others), other_rows))
    if len(parts) == 1:
        return parts[0][0]
    device = next((part.device for part, _ in parts if part.device.type != "cpu"), None)
    wide = any(part.dtype is torch.float64 for part, _ in parts)
    order = torch.tensor([r for _, rows in parts for r in rows]).argsort()
    together = torch.cat(
        [part.to(device, torch.float64 if wide else torch.float32) for part, _ in parts]
    )
    return together[order.to(together.device)]


def _numbers(scalars: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers whose bits these are, shape ``[count, 2]``."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return torch.stack(scalars).view(dtype).to(wide).view(-1, 2)
