"""Tensors in memory: their range, their dtype, and whether their elements are there."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.formats import spelled_out
from fxguard.measure import traceable
from fxguard.measure.func_levels import without_levels
from fxguard.records import NOT_MEASURED, Range
from fxguard.torch_names import DisableTorchFunction, set_grad_enabled

__all__ = [
    "VERSION",
    "dtype_named",
    "dtype_of",
    "has_memory",
    "may_wait_for",
    "name_of_dtype",
    "own_arithmetic",
    "range_of",
    "version_of",
    "versions_of",
]

# How often a tensor was written, callable on many; raises for an inference tensor.
VERSION = attrgetter("_version")


@torch.no_grad()
def range_of(tensor: Tensor) -> Range | str:
    """The range of a tensor, or the reason why there is none.

    Example:
        >>> range_of(torch.tensor([-2.0, 1.0]))
        Range(abs_min=1.0, abs_max=2.0)
    """
    tensor = without_levels(tensor)
    if tensor.is_meta:
        return "meta"
    if not has_memory(tensor):
        return NOT_MEASURED
    try:
        low, high = traceable.abs_min_max(tensor)
        return traceable.decode(float(low), float(high))
    except (NotImplementedError, RuntimeError):  # a subclass that supports few operations
        return NOT_MEASURED


def dtype_of(tensor: Tensor) -> str:
    """``float16``."""
    return name_of_dtype(tensor.dtype)


@functools.cache
def name_of_dtype(dtype: torch.dtype) -> str:
    """``float16``; cached, because making it takes as long as measuring a small tensor."""
    return str(dtype).removeprefix("torch.")


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or the dtype with a name such as "float16", "torch.float16" or "fp16".

    Raises:
        FxguardError: when there is no such dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, spelled_out(dtype), None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise UsageError(f"a dtype is torch.float16 or a name such as 'float16', got {dtype!r}")
    return found


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written; None for an inference tensor, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def versions_of(values: Iterable[object]) -> tuple[int | None, ...]:
    """How often each of many values was written; None also for anything other than a tensor."""
    return tuple(version_of(each) if isinstance(each, Tensor) else None for each in values)


def has_memory(value: Tensor) -> bool:
    """Whether a tensor's elements are there: FSDP frees only the storage of weights."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return True
    if value.is_nested or value.is_meta or not value.numel():
        return True
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    needed = (value.storage_offset() + last + 1) * value.element_size()
    return value.untyped_storage().nbytes() >= needed


def may_wait_for(tensor: Tensor) -> bool:
    """Whether a number of a tensor on a GPU may be read: not while a CUDA graph is recorded."""
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


class own_arithmetic:  # noqa: N801 - used as a function; a generator takes four times as long
    """Hide fxguard's own arithmetic from autograd, subclasses and torch function modes."""

    __slots__ = ("_hidden", "_was_enabled")

    def __enter__(self) -> None:
        self._hidden = DisableTorchFunction()
        self._hidden.__enter__()
        self._was_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._was_enabled)
        self._hidden.__exit__(*error)


def flattened(value: Tensor) -> Tensor | None:
    """The elements in storage order; None if there are gaps between them.

    An expanded dimension repeats the same elements.
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
