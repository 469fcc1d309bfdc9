"""The magnitude ranges of tensors in memory, read by the part of this package that is in C.

It is built where there is a C compiler when fxguard is installed. Without it everything works, and
:mod:`fxguard.measure.eager` measures with torch's operations, which takes several times as long.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["abs_min_max", "all_finite", "is_built", "is_observed", "packed", "reading_or"]

LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(
    sys.platform, "libtorch_cpu.so"
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = frozenset((*FLOATS, *SIGNED, *UNSIGNED))

Pair = tuple[float, float]
Reader = Callable[[object], Pair | None]

# Bound here: they are asked at each check.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_func_levels = torch._C._functorch.peek_interpreter_stack


def is_observed() -> bool:
    """Whether somebody may be tracing what runs here, or batching or differentiating it."""
    return bool(_dispatch_modes() or _func_levels() is not None)


class _NotBuilt:
    """What the part in C has, where it is not built."""

    @staticmethod
    def abs_min_max(value: object) -> Pair | None:
        return None

    packed = abs_min_max

    @staticmethod
    def reading_or(otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return otherwise

    @staticmethod
    def all_finite(numbers: bytearray) -> bool:
        raise NotImplementedError


def _bound() -> Any:
    try:
        from fxguard.measure import _native

        exchange = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        plain = (Tensor, torch.nn.Parameter, torch.strided, DTYPES)
        _native.bind_observers(_dispatch_modes, _func_levels)
        _native.bind(exchange, *plain, _parallel_for())
    except (ImportError, AttributeError):
        # It is not built, or of another version; or it does not know this version of DLPack.
        return _NotBuilt
    return _native


def _parallel_for() -> int:
    """The address of a function that shares work among torch's threads, 0 where it is not found.

    It is part of torch's stable C interface (``torch/csrc/stable/c/shim.h``).
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARY))
        return ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another system, another version
        return 0


_functions = _bound()

# The smallest and the largest magnitude in a tensor, or None for what has to be asked otherwise: a
# tensor that is empty, of a subclass, on another device, without memory of its own, or of a rare
# dtype; and what is no tensor. Where there is a NaN the largest is one, and the smallest is that of
# the others.
abs_min_max: Reader = _functions.abs_min_max

# Given a function, one that reads as `abs_min_max` does, and asks that function of what cannot be
# read, or is observed. A check in a graph is one call of it, and no frame of Python.
reading_or: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = _functions.reading_or

# The numbers of a list of such pairs as doubles, or None where it holds anything else.
packed: Callable[[object], bytearray | None] = _functions.packed

# Whether none of those that are the second of their pair is NaN or inf.
all_finite: Callable[[bytearray], bool] = _functions.all_finite

is_built = _functions is not _NotBuilt
