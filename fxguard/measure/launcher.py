"""Starts a compiled kernel through the CUDA driver: Triton's own call takes four times as long."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from fxguard.measure import native

__all__ = ["Known", "known_to_the_driver", "start"]

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# The first four arguments of `native.launch`, which are the same in each call.
Known = tuple[int, int, int, int]

# Arguments behind a kernel's own: the memory that Triton would lend to one that needs some.
LENT = 2

_local = threading.local()


def known_to_the_driver(compiled: Any, arguments: int) -> Known | None:
    """How the driver starts a kernel that Triton has compiled and started once.

    Args:
        compiled: what Triton returned.
        arguments: how many numbers and addresses the driver will be given. A kernel into which
            Triton compiled one of them would take each of the others for its neighbour.

    Returns:
        The first arguments of :func:`fxguard.measure.native.launch`; None if Triton has to start it
        each time, because it hands over memory, or keeps something else ready.
    """
    if native.launch is None:
        return None
    try:
        made = compiled.metadata
        asks = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
        if any(getattr(made, name, 0) for name in asks) or getattr(made, "num_ctas", 1) != 1:
            return None
        if _arguments_of(compiled.src.signature.values()) != arguments:
            return None
        threads = made.num_warps * made.target.warp_size
        return _address_of_start(), int(compiled.function), threads, int(made.shared)
    except (AttributeError, OSError, TypeError, ValueError):  # another Triton, or another driver
        return None


def _arguments_of(types: Iterable[Any]) -> int:
    """How many arguments a kernel takes, given Triton's names of their types."""
    return sum(
        _arguments_of(each) if isinstance(each, tuple | list) else each != "constexpr"
        for each in types
    )


@functools.cache
def _address_of_start() -> int:
    return ctypes.cast(ctypes.CDLL(DRIVER).cuLaunchKernel, ctypes.c_void_p).value or 0


def start(known: Known, stream: int, programs: int, arguments: Sequence[int]) -> bool:
    """Start a kernel that has many arguments; False if the driver refuses.

    Args:
        known: from :func:`known_to_the_driver`.
        stream: the driver's handle.
        programs: how many there are.
        arguments: integers. The driver reads the lower half of each where the kernel takes 32 bits.
    """
    address, function, threads, shared = known
    numbers, places = _places_of(len(arguments) + LENT)
    numbers[: len(arguments)] = arguments
    return not _starter(address)(
        *(function, programs, 1, 1, threads, 1, 1, shared, stream or None, places, None)
    )


def _places_of(count: int) -> tuple[Any, Any]:
    """Memory for so many integers, and their addresses; kept for each thread."""
    kept: dict[int, tuple[Any, Any]] = _local.__dict__.setdefault("places", {})
    if count not in kept:
        numbers = (ctypes.c_int64 * count)()
        first, size = ctypes.addressof(numbers), ctypes.sizeof(ctypes.c_int64)
        places = (ctypes.c_void_p * count)(*(first + place * size for place in range(count)))
        kept[count] = numbers, places
    return kept[count]


@functools.cache
def _starter(address: int) -> Any:
    """The driver's ``cuLaunchKernel``."""
    pointers: Any = ctypes.POINTER(ctypes.c_void_p)
    arguments: list[Any] = [ctypes.c_void_p, *[ctypes.c_uint] * 7]
    arguments += [ctypes.c_void_p, pointers, ctypes.c_void_p]
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)
