"""Ranges of tensors on a GPU: one kernel reads a tensor once and needs no extra memory.

Torch's own operations take three kernels and a copy of the magnitudes, for the same numbers.
:mod:`fxguard.measure.traceable` handles what the kernel does not: other dtypes, gaps between
elements, other devices, and machines on which Triton is missing or gives another answer.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import torch
from torch import Tensor

from fxguard.measure import traceable
from fxguard.measure.at_hand import flattened

__all__ = ["abs_min_max", "read"]

BLOCK = 1024  # elements that one program reads at once
PROGRAMS = 1024  # at most; each reads one block after another
ROWS = 64  # results for which memory is prepared at once

# The dtypes that the kernel reads, with the dtypes of their bits.
BITS = {
    torch.float16: torch.int32,
    torch.bfloat16: torch.int32,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
NUMBERS = {torch.int32: torch.float32, torch.int64: torch.float64}

KNOWN = (3.0, -math.inf, 0.5, -0.25)  # numbers and their range, to try the kernel with
KNOWN_RANGE = (0.25, math.inf)

_PLAIN = (Tensor, torch.nn.Parameter)
_local = threading.local()


def abs_min_max(value: Any) -> traceable.Pair | None:
    """The range of a tensor on a GPU; None if it has to be measured in another way.

    Returns:
        Two tensors of shape ``[]``, float64 if the tensor is, else float32.
    """
    if (
        type(value) not in _PLAIN
        or not value.is_cuda
        or value.dtype not in BITS
        or value.layout is not torch.strided
        or value.is_nested
        or torch.version.hip is not None
        or torch.cuda.is_current_stream_capturing()
        or not _works(value.device, value.dtype)
    ):
        return None
    with torch.cuda.device(value.device):
        return read(value)


def read(value: Tensor) -> traceable.Pair | None:
    """The range of a tensor wherever the kernel runs; None if there are gaps between elements."""
    elements = flattened(value.detach())
    if elements is None or not elements.numel():
        return None
    size = elements.numel()
    blocks = -(-size // BLOCK)
    programs = min(blocks, PROGRAMS)
    rounds = -(-blocks // programs)
    bits, pair = _next_row(value.device, BITS[value.dtype])
    most = torch.iinfo(bits.dtype).max
    launch = _kernel()[(programs,)]
    launch(elements, bits, size, programs, rounds, most=most, block=BLOCK)
    return pair


@functools.cache
def _kernel() -> Any:
    from fxguard.measure._kernel import read_range

    return read_range


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the right answer on a device, which is tried once."""
    try:
        pair = read(torch.tensor(KNOWN, dtype=dtype, device=device))
        return pair is not None and (float(pair[0]), float(pair[1])) == KNOWN_RANGE
    except Exception:  # no Triton, no compiler for it, or an unknown GPU
        return False


def _next_row(device: torch.device, integer: torch.dtype) -> tuple[Tensor, traceable.Pair]:
    """Memory for one result: two integers, and the numbers that share their bits.

    Each row is used once. It is prepared in the stream in which it is used.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    rows = _local.__dict__.setdefault("rows", {})
    key = device, integer, stream
    if not rows.get(key):
        with torch.inference_mode(False), torch.no_grad():
            start = torch.tensor([torch.iinfo(integer).max, 0], dtype=integer, device=device)
            bits = start.expand(ROWS, 2).clone()
            numbers = bits.view(NUMBERS[integer])
        pairs = (tuple(pair.unbind()) for pair in numbers.unbind())
        rows[key] = list(zip(bits.unbind(), pairs, strict=True))
    row: tuple[Tensor, traceable.Pair] = rows[key].pop()
    return row
