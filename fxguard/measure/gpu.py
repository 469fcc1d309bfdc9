"""Ranges of tensors on a GPU: one kernel reads a tensor once and needs no extra memory.

:mod:`fxguard.measure.gpu_table` reads many tensors in one launch.

Torch's own operations take three kernels and a copy of the magnitudes, for the same numbers.
:mod:`fxguard.measure.traceable` handles what the kernel does not: other dtypes, gaps between
elements, other devices, and machines on which Triton is missing or gives another answer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import native
from fxguard.measure.at_hand import flattened
from fxguard.measure.func_levels import levels_left
from fxguard.measure.launcher import Known, known_to_the_driver
from fxguard.torch_names import cuda_device, cuda_is_capturing, cuda_stream

__all__ = ["Row", "Rows", "abs_min_max", "is_readable", "joined", "on", "read", "rows_for"]

BLOCK = 4096  # elements that one program reads at once
WARPS = 16  # of 32 threads, in each program
PROGRAMS = 528  # at most, four for each multiprocessor of an H100; each reads block after block
ROWS = 1024  # results for which memory is prepared at once
ARGUMENTS = 5  # of the kernel that reads one tensor
ALIGNED = 16  # bytes: elements that begin at a multiple of it are loaded several at a time

# The dtypes that the kernel reads, with the dtypes of their bits.
BITS = {
    torch.float16: torch.int32,
    torch.bfloat16: torch.int32,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
NUMBERS = {torch.int32: torch.float32, torch.int64: torch.float64}
LARGEST = {integer: torch.iinfo(integer).max for integer in NUMBERS}

KNOWN = (3.0, -math.inf, 0.5, -0.25)  # numbers and their range, to try the kernel with
KNOWN_RANGE = (0.25, math.inf)

_PLAIN = (Tensor, torch.nn.Parameter)
_local = threading.local()


class Row:
    """The range of one tensor, which a kernel writes into memory on the GPU.

    It unpacks to two tensors of shape ``[]`` that share this memory; :func:`joined` needs none.
    """

    __slots__ = ("index", "numbers")

    def __init__(self, numbers: Tensor, index: int) -> None:
        self.numbers = numbers  # of all rows of a block, [ROWS, 2]
        self.index = index

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.numbers[self.index].unbind())

    def __getitem__(self, column: int) -> Tensor:
        return self.numbers[self.index, column]


class Rows:
    """Memory for results: integers, and the numbers that share their bits. Each row is used once.

    It is prepared in the stream in which it is used.
    """

    def __init__(self, device: torch.device, integer: torch.dtype) -> None:
        with levels_left(), torch.inference_mode(False), torch.no_grad():
            self.bits = torch.zeros((ROWS, 2), dtype=integer, device=device)
            self.bits[:, 0].fill_(LARGEST[integer])
            self.numbers = self.bits.view(NUMBERS[integer])
        self.address = self.bits.data_ptr()
        self.bytes = 2 * self.bits.element_size()
        self.used = 0


def is_readable(value: Any, dtypes: Container[torch.dtype] = BITS.keys()) -> bool:
    """Whether it is a tensor on a GPU that a kernel reads, while no stream is recorded."""
    return (
        type(value) in _PLAIN
        and value.is_cuda
        and value.dtype in dtypes
        and value.layout is torch.strided
        and not value.is_nested
        and torch.version.hip is None
        and not cuda_is_capturing()
    )


def abs_min_max(value: Any) -> Row | None:
    """The range of a tensor on a GPU; None if it has to be measured in another way.

    Returns:
        Two tensors of shape ``[]``, float64 if the tensor is, else float32.
    """
    if not is_readable(value) or not _works(value.device, value.dtype):
        return None
    if value.device.index == cuda_device():
        return read(value)
    with torch.cuda.device(value.device):
        return read(value)


def read(value: Tensor) -> Row | None:
    """The range of a tensor wherever the kernel runs; None if there are gaps between elements."""
    elements = value if value.is_contiguous() else flattened(value.detach())
    if elements is None or not (size := elements.numel()) or not (address := elements.data_ptr()):
        return None
    device, dtype = value.device, value.dtype
    integer = BITS[dtype]
    stream = cuda_stream(device.index) if value.is_cuda else 0
    blocks = -(-size // BLOCK)
    programs = min(blocks, PROGRAMS)
    rounds = -(-blocks // programs)
    rows, index = rows_for(1, device, integer, stream)
    row = Row(rows.numbers, index)
    key = device, dtype, address % ALIGNED == 0, size > LARGEST[torch.int32]
    known = _known.get(key)
    if known is not None:
        assert native.launch is not None
        place = rows.address + index * rows.bytes
        if not native.launch(*known, stream, address, place, size, programs, rounds):
            return row
    flat = elements.detach().view(-1)
    options = {"most": LARGEST[integer], "block": BLOCK, "num_warps": WARPS}
    compiled = _kernel()[(programs,)](flat, rows.bits[index], size, programs, rounds, **options)
    _known[key] = known_to_the_driver(compiled, ARGUMENTS)
    return row


# How the driver starts the kernels that are compiled, for each device, dtype, and what Triton knows
# of the arguments; None where Triton starts them.
_known: dict[tuple[torch.device, torch.dtype, bool, bool], Known | None] = {}


@functools.cache
def _kernel() -> Any:
    from fxguard.measure._kernel import read_range

    return read_range


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which a kernel for a device is started."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is right on a device: tried once, in both ways to start it."""
    try:
        with torch.inference_mode(False), torch.no_grad(), on(device):
            known = torch.tensor(KNOWN, dtype=dtype, device=device)
            rows = [read(known), read(known)]
            return all(row is not None and tuple(map(float, row)) == KNOWN_RANGE for row in rows)
    except theirs():  # no Triton, no compiler for it, or an unknown GPU
        return False


def rows_for(
    count: int, device: torch.device, integer: torch.dtype, stream: int
) -> tuple[Rows, int]:
    """Rows that nobody has used, one after the other, for this thread: their memory, the first."""
    kept: dict[Any, Rows] = _local.__dict__.setdefault("rows", {})
    key = device, integer, stream
    rows = kept.get(key)
    if rows is None or rows.used + count > ROWS:
        rows = kept[key] = Rows(device, integer)
    first = rows.used
    rows.used += count
    return rows, first


def joined(rows: Sequence[Row]) -> list[Tensor]:
    """The numbers of many rows, in order, in as few tensors of shape ``[n, 2]`` as there can be."""
    found: list[Tensor] = []
    # Rows of one block that follow each other have the same distance to their place in the list.
    runs = itertools.groupby(
        enumerate(rows), lambda pair: (id(pair[1].numbers), pair[1].index - pair[0])
    )
    for _, run in runs:
        (_, first), *others = run
        found.append(first.numbers[first.index : first.index + 1 + len(others)])
    return found
