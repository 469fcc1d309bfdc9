"""The magnitude ranges of tensors in memory, read by the part of this package that is in C.

It is built where there is a C compiler when fxguard is installed. Without it everything works, and
:mod:`fxguard.measure.eager` measures with torch's operations, which takes several times as long.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["abs_min_max", "is_built", "packed"]

LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(
    sys.platform, "libtorch_cpu.so"
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = frozenset((*FLOATS, *SIGNED, *UNSIGNED))

Reader = Callable[[object], tuple[float, float] | None]
Packer = Callable[[object], bytearray | None]


def _left_out(value: object) -> None:
    return None


def _bound() -> tuple[Reader, Packer]:
    try:
        from fxguard.measure import _native

        exchange = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        plain = (Tensor, torch.nn.Parameter, torch.strided, DTYPES)
        _native.bind(exchange, *plain, _parallel_for())
    except (ImportError, AttributeError):  # not built; or a version of DLPack that it does not know
        return _left_out, _left_out
    return _native.abs_min_max, _native.packed


def _parallel_for() -> int:
    """The address of a function that shares work among torch's threads, 0 where it is not found.

    It is part of torch's stable C interface (``torch/csrc/stable/c/shim.h``).
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARY))
        return ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another system, another version
        return 0


abs_min_max, packed = _bound()

# `abs_min_max` gives the smallest and the largest magnitude in a tensor, or None for what has to be
# asked otherwise: a tensor that is empty, of a subclass, on another device, without memory of its
# own, or of a rare dtype; and what is no tensor. Where there is a NaN the largest is one, and the
# smallest is that of the others.
#
# `packed` gives the numbers of a list of such pairs as doubles, or None where it holds anything
# else.

is_built = abs_min_max is not _left_out
