"""Starts a compiled kernel through the CUDA driver: Triton's own call takes four times as long."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from fxguard.measure import native

__all__ = ["Known", "known_to_the_driver"]

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# The first four arguments of `native.launch`, which are the same in each call.
Known = tuple[int, int, int, int]


def known_to_the_driver(compiled: Any) -> Known | None:
    """How the driver starts a kernel that Triton has compiled and started once.

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
        threads = made.num_warps * made.target.warp_size
        return _address_of_start(), int(compiled.function), threads, int(made.shared)
    except (AttributeError, OSError, TypeError, ValueError):  # another Triton, or another driver
        return None


@functools.cache
def _address_of_start() -> int:
    return ctypes.cast(ctypes.CDLL(DRIVER).cuLaunchKernel, ctypes.c_void_p).value or 0
