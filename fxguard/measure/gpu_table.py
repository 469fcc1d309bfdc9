"""Ranges of many tensors on a GPU in one launch: their addresses and sizes are its arguments.

A launch takes the processor's time whatever it reads. A table among the arguments needs no memory
on the GPU and no copy to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import gpu
from fxguard.measure.at_hand import flattened
from fxguard.measure.launcher import Known, known_to_the_driver, start
from fxguard.torch_names import cuda_stream

__all__ = ["PLACES", "elements_of", "read", "works"]

PLACES = 64  # tensors in one table
LARGEST = 2**30 - 1  # elements: twice as many, and one, are an argument of 32 bits

# How the driver starts the kernel for each device and dtype; None where Triton starts it.
_known: dict[tuple[torch.device, torch.dtype], Known | None] = {}


def elements_of(value: Tensor) -> Tensor | None:
    """The elements of a tensor that a table has a place for, else None.

    They have no gaps between them, and begin at a multiple of 16 bytes.
    """
    elements = value if value.is_contiguous() else flattened(value.detach())
    if elements is None or not 0 < elements.numel() <= LARGEST:
        return None
    address = elements.data_ptr()
    return elements if address and address % gpu.ALIGNED == 0 else None


def read(elements: Sequence[Tensor]) -> list[gpu.Row]:
    """The ranges of tensors of one dtype on the current device, at most :data:`PLACES`.

    Args:
        elements: from :func:`elements_of`.
    """
    device, dtype = elements[0].device, elements[0].dtype
    integer = gpu.BITS[dtype]
    stream = cuda_stream(device.index) if elements[0].is_cuda else 0
    addresses = [each.data_ptr() for each in elements]
    sizes = [each.numel() for each in elements]
    blocks = [-(-size // gpu.BLOCK) for size in sizes]
    rounds = -(-sum(blocks) // gpu.PROGRAMS)
    ends = list(itertools.accumulate(-(-count // rounds) for count in blocks))
    programs, free = ends[-1], PLACES - len(sizes)
    addresses += free * [addresses[0]]
    sizes += free * [1]
    ends += free * [programs]
    table = (addresses, [2 * size + 1 for size in sizes], [2 * end + 1 for end in ends])
    rows, first = gpu.rows_for(len(elements), device, integer, stream)
    found = [gpu.Row(rows.numbers, first + place) for place in range(len(elements))]
    known = _known.get((device, dtype))
    if known is not None:
        place = rows.address + first * rows.bytes
        if start(known, stream, programs, [*itertools.chain(*table), place, rounds]):
            return found
    kernel, dtypes = _kernel()
    options = {"most": gpu.LARGEST[integer], "block": gpu.BLOCK, "num_warps": gpu.WARPS}
    options |= {"count": PLACES, "dtype": dtypes[dtype], "alignment": gpu.ALIGNED}
    compiled = kernel[(programs,)](*map(tuple, table), rows.bits[first:], rounds, **options)
    _known[device, dtype] = known_to_the_driver(compiled)
    return found


@functools.cache
def _kernel() -> Any:
    """The kernel, and Triton's name for each dtype."""
    from fxguard.measure._kernel import DTYPES, read_ranges

    return read_ranges, {dtype: DTYPES[str(dtype)] for dtype in gpu.BITS}


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is right on a device: tried once, in both ways to start it."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            known = torch.tensor(gpu.KNOWN, dtype=dtype, device=device)
            most = torch.zeros(gpu.BLOCK + 3, dtype=dtype, device=device)
            ranges = [gpu.KNOWN_RANGE, (0.0, 0.0), gpu.KNOWN_RANGE]
            rows = read([known, most, known]) + read([known, most, known])
        return [tuple(map(float, row)) for row in rows] == 2 * ranges
    except theirs():  # no Triton, no compiler for it, or an unknown GPU
        return False
