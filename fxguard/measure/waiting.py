"""Values of a running graph that wait to be measured together: a launch takes as long for one.

A value that waits is kept. So the values that wait have at most a share of the memory of their
device, and a graph measures them before it writes one of them, and at its end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.measure import eager, gpu, gpu_table, native
from fxguard.torch_names import cuda_device, cuda_stream

__all__ = ["ON_A_GPU", "Together", "Waiting", "begin", "is_on_a_gpu", "later", "measure"]

SHARE = 256  # what waits has at most this part of a device's memory: 320 MB of 80 GB
ELSEWHERE = 2**26  # bytes, on a device that does not say how much memory it has

_at_once = native.reading_or(eager.otherwise)


class Waiting:
    """What waits in one run of a graph: elements, and the rows that will hold their ranges."""

    __slots__ = ("bytes", "place", "values")

    def __init__(self) -> None:
        self.values: dict[torch.dtype, list[tuple[Tensor, gpu.Row]]] = {}
        self.bytes = 0
        self.place: tuple[torch.device, int] | None = None  # their device and stream


def begin() -> Waiting:
    """Nothing waits yet."""
    return Waiting()


def later(waiting: Waiting, value: Any) -> eager.Pair:
    """The range of a value, which may be known only once :func:`measure` has run."""
    if native.is_observed() or not gpu.is_readable(value):
        return _at_once(value)  # type: ignore[no-any-return]
    elements = gpu_table.elements_of(value)
    device = value.device
    if elements is None or not gpu_table.works(device, value.dtype):
        return _at_once(value)  # type: ignore[no-any-return]
    place = device, cuda_stream(device.index) if value.is_cuda else 0
    if place != waiting.place:
        measure(waiting)
        waiting.place = place
    row = gpu.Row()
    of_its_dtype = waiting.values.setdefault(value.dtype, [])
    of_its_dtype.append((elements, row))
    waiting.bytes += value.untyped_storage().nbytes()
    if len(of_its_dtype) == gpu_table.PLACES or waiting.bytes > _most_bytes(device):
        measure(waiting)
    return row


def measure(waiting: Waiting) -> None:
    """Measure all that waits, with one launch for each dtype."""
    if waiting.place is None or not waiting.values:
        return
    kept, waiting.values, waiting.bytes = waiting.values, {}, 0
    with _in_stream(*waiting.place):
        for of_one_dtype in kept.values():
            elements = [each for each, _ in of_one_dtype]
            for (_, row), found in zip(of_one_dtype, _read(elements), strict=True):
                row.numbers, row.index = found.numbers, found.index


def _read(elements: list[Tensor]) -> list[gpu.Row]:
    try:
        if len(elements) == 1 and (row := gpu.read(elements[0])) is not None:
            return [row]
        return gpu_table.read(elements)
    except theirs():  # the driver or Triton refuses
        pairs = [eager.otherwise(each) for each in elements]
        return [gpu.Row(torch.stack([*pair]).view(1, 2), 0) for pair in pairs]


@contextlib.contextmanager
def _in_stream(device: torch.device, stream: int) -> Iterator[None]:
    """Where the values were made: usually where the program is."""
    here = device.index, stream
    if device.type != "cuda" or here == (cuda_device(), cuda_stream(device.index)):
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        yield


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
    begin: Callable[[], Any] = begin
    later: Callable[[Any, Any], Any] = later
    measure: Callable[[Any], None] = measure


ON_A_GPU = Together(is_on_a_gpu)
