"""Ranges of many tensors on a GPU in one launch: their addresses and sizes are its arguments.

A launch takes the processor's time whatever it reads. A table among the arguments needs no memory
on the GPU and no copy to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import gpu
from fxguard.measure.launcher import Known, known_to_the_driver, start
from fxguard.torch_names import cuda_stream

__all__ = ["BITS", "PLACES", "Piece", "piece_of", "read", "works"]

PLACES = 64  # tensors in one table
LARGEST = 2**30 - 1  # twice this number, and one, is an argument of 32 bits

# The dtypes that the kernel reads, with the dtypes of their bits: integers are read as float32.
BITS = gpu.BITS | dict.fromkeys(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int32
)

# How the driver starts the kernel for each device and dtype, with gaps and without; None where
# Triton starts it.
_known: dict[tuple[torch.device, torch.dtype, bool], Known | None] = {}


class Piece(NamedTuple):
    """The elements of a tensor: stretches of the same length, at the same distance."""

    tensor: Tensor  # whose memory it is
    address: int
    size: int  # elements in all
    length: int  # elements in a stretch
    stride: int  # elements from the beginning of a stretch to that of the next one

    @property
    def has_gaps(self) -> bool:
        """Whether it is not one stretch at an address where many elements are loaded at once."""
        return self.length != self.size or self.address % gpu.ALIGNED != 0


def piece_of(value: Tensor) -> Piece | None:
    """The elements of a tensor, in any order; None if a table has no place for them."""
    size = value.numel()
    if not 0 < size <= LARGEST or not (address := value.data_ptr()):
        return None
    if value.is_contiguous():
        return Piece(value, address, size, size, size)
    axes: list[tuple[int, int]] = []  # stride and size, those that continue each other as one
    for stride, length in sorted(zip(value.stride(), value.shape, strict=True)):
        if length == 1 or stride == 0:  # an expanded axis repeats the same elements
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:
            stride, length = axes[-1][0], axes.pop()[1] * length
        axes.append((stride, length))
    if len(axes) < 2 and (not axes or axes[0][0] != 1):
        axes.insert(0, (1, 1))
    if len(axes) == 1:
        axes.append((axes[0][1], 1))
    (one, length), (stride, lines) = axes[0], axes[-1]
    if len(axes) > 2 or one != 1 or stride > LARGEST:
        return None
    return Piece(value, address, length * lines, length, stride)


def read(pieces: Sequence[Piece], rows: gpu.Rows, places: Sequence[int]) -> None:
    """Read tensors of one dtype on the current device, all with gaps or none.

    Args:
        pieces: at most :data:`PLACES`.
        rows: the memory for the ranges.
        places: the row of each tensor.
    """
    tensor, has_gaps = pieces[0].tensor, pieces[0].has_gaps
    device, dtype = tensor.device, tensor.dtype
    blocks = [-(-piece.size // gpu.BLOCK) for piece in pieces]
    rounds = -(-sum(blocks) // gpu.PROGRAMS)
    ends = list(itertools.accumulate(-(-count // rounds) for count in blocks))
    programs = ends[-1]
    lines = [
        (piece.address, piece.size, end, place + 1, piece.length, piece.stride)
        for piece, end, place in zip(pieces, ends, places, strict=True)
    ]
    unused = (pieces[0].address, 1, programs, 1, 1, 1)  # an address, for it has to have 64 bits
    lines += (PLACES - len(pieces)) * [unused]
    table = [tuple([2 * number + 1 for number in column]) for column in zip(*lines, strict=True)]
    key = device, dtype, has_gaps
    known = _known.get(key)
    if known is not None:
        stream = cuda_stream(device.index) if tensor.is_cuda else 0
        if start(known, stream, programs, [*itertools.chain(*table), rows.address, rounds]):
            return
    kernel, dtypes = _kernel()
    options = {"most": gpu.LARGEST[BITS[dtype]], "block": gpu.BLOCK, "num_warps": gpu.WARPS}
    options |= {"count": PLACES, "dtype": dtypes[dtype], "has_gaps": has_gaps}
    options["alignment"] = dtype.itemsize if has_gaps else gpu.ALIGNED
    compiled = kernel[(programs,)](*table, rows.bits, rounds, **options)
    _known[key] = known_to_the_driver(compiled, len(table) * PLACES + 2)


@functools.cache
def _kernel() -> Any:
    """The kernel, and Triton's name for each dtype."""
    from fxguard.measure._kernel import DTYPES, read_ranges

    return read_ranges, {dtype: DTYPES[str(dtype)] for dtype in BITS}


@functools.cache
def works(device: torch.device, dtype: torch.dtype, has_gaps: bool) -> bool:
    """Whether the kernel is right on a device: tried once, in both ways to start it."""
    numbers, wanted = (gpu.KNOWN, gpu.KNOWN_RANGE) if dtype in gpu.BITS else ((1, 0, 1), (0.0, 1.0))
    step = 2 if has_gaps else 1
    try:
        with torch.inference_mode(False), torch.no_grad(), gpu.on(device):
            spread = [number for number in numbers for _ in range(step)]
            known = torch.tensor(spread, dtype=dtype, device=device)[::step]
            zeros = torch.zeros(2 * gpu.BLOCK + 6, dtype=dtype, device=device)[::step]
            pieces = [piece for each in (known, zeros, known) if (piece := piece_of(each))]
            stream = cuda_stream(known.device.index) if known.is_cuda else 0
            rows, first = gpu.rows_for(6, device, BITS[dtype], stream)
            for begin in (first, first + 3):
                read(pieces, rows, range(begin, begin + 3))
            found = rows.numbers[first : first + 6].tolist()
        return [*map(tuple, found)] == 2 * [wanted, (0.0, 0.0), wanted]
    except theirs():  # no Triton, no compiler for it, or an unknown GPU
        return False
