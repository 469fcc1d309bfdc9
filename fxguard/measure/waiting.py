"""Values of a running graph that wait to be measured together: a launch takes as long for one.

A value that waits is kept. So the values that wait have at most a share of the memory of their
device, and a graph measures them before it writes one of them, and at its end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import eager, gpu, gpu_table, native
from fxguard.torch_names import cuda_device, cuda_stream

__all__ = ["ON_A_GPU", "Together", "Waiting", "is_on_a_gpu", "later", "measure", "row_of"]

SHARE = 256  # what waits has at most this part of a device's memory: 320 MB of 80 GB
ELSEWHERE = 2**26  # bytes, on a device that does not say how much memory it has

_at_once = native.reading_or(eager.otherwise)


class Waiting:
    """What waits to be measured, of one device and stream."""

    __slots__ = ("bytes", "pieces", "place", "rows")

    def __init__(self) -> None:
        # By dtype, with gaps between elements and without: the tensors, each with its row.
        self.pieces: dict[tuple[torch.dtype, bool], list[tuple[gpu_table.Piece, int]]] = {}
        self.bytes = 0
        self.place: tuple[torch.device, int] | None = None  # their device and stream
        self.rows: dict[torch.dtype, gpu.Rows] = {}  # by the dtype of their bits


def later(waiting: Waiting, value: Any) -> eager.Pair:
    """The range of a value, which may be known only once :func:`measure` has run."""
    row = None if native.is_observed() else row_of(waiting, value)
    return _at_once(value) if row is None else row


def row_of(waiting: Waiting, value: Any) -> gpu.Row | None:
    """The row of a value that waits from now on; None if it has to be measured otherwise."""
    if not gpu.is_readable(value, gpu_table.BITS):
        return None
    piece, device, dtype = gpu_table.piece_of(value), value.device, value.dtype
    if piece is None or not gpu_table.works(device, dtype, has_gaps := piece.has_gaps):
        return None
    place = device, cuda_stream(device.index) if value.is_cuda else 0
    if place != waiting.place:
        measure(waiting)
        waiting.place = place
    bits = gpu_table.BITS[dtype]
    rows, index = gpu.rows_for(1, device, bits, place[1])
    if waiting.rows.get(bits) is not rows:
        measure(waiting)
        waiting.rows[bits] = rows
    alike = waiting.pieces.setdefault((dtype, has_gaps), [])
    alike.append((piece, index))
    waiting.bytes += value.untyped_storage().nbytes()
    if len(alike) == gpu_table.PLACES or waiting.bytes > _most_bytes(device):
        measure(waiting)
    return gpu.Row(rows.numbers, index)


def measure(waiting: Waiting) -> None:
    """Measure all that waits, with one launch for each dtype."""
    if waiting.place is None or not waiting.pieces:
        return
    kept, waiting.pieces, waiting.bytes = waiting.pieces, {}, 0
    with _in_stream(*waiting.place):
        for (dtype, _), alike in kept.items():
            _read(alike, waiting.rows[gpu_table.BITS[dtype]])


def _read(alike: Sequence[tuple[gpu_table.Piece, int]], rows: gpu.Rows) -> None:
    try:
        gpu_table.read([piece for piece, _ in alike], rows, [place for _, place in alike])
    except theirs():  # the driver or Triton refuses
        for piece, place in alike:
            low, high = eager.otherwise(piece.tensor)
            rows.numbers[place, 0], rows.numbers[place, 1] = low, high


@contextlib.contextmanager
def _in_stream(device: torch.device, stream: int) -> Iterator[None]:
    """Where the values were made: usually where the program is."""
    here = device.index, stream
    if device.type != "cuda" or here == (cuda_device(), cuda_stream(device.index)):
        yield
        return
    now = torch.cuda.current_stream(device)
    where = torch.cuda.ExternalStream(stream, device)
    with torch.cuda.stream(where):
        yield
    now.wait_stream(where)  # whoever reads the rows is there


@functools.cache
def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return ELSEWHERE
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def is_on_a_gpu(example: Any) -> bool:
    """Whether a value is a tensor on a GPU, judged by a graph's example of it."""
    return isinstance(example, Tensor) and example.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Together:
    """How the values of a graph are measured together.

    Attributes:
        takes: whether a value is measured so, judged by the graph's example of it.
        begin: called first; what it returns is the first argument of the others.
        later: called with each value in place of :attr:`fxguard.measure.ways.Way.abs_min_max`.
        measure: called before a value is written, and at the end.
    """

    takes: Callable[[Any], bool]
    begin: Callable[[], Any] = Waiting
    later: Callable[[Any, Any], Any] = later
    measure: Callable[[Any], None] = measure


ON_A_GPU = Together(is_on_a_gpu)
