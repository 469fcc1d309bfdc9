"""A CPU taken for a GPU, so that what would be launched there can be counted here.

With Triton's interpreter the kernels themselves run; without it torch's operations take their
place. What they read, and when, is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Container, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxguard.capture import _copies
from fxguard.measure import eager, finite, gpu, gpu_table, native, traceable, waiting, ways
from fxguard.steps import backward


@dataclasses.dataclass
class Launches:
    """How many kernels of checks were launched, and how many tensors each read."""

    tensors: list[int] = dataclasses.field(default_factory=list)
    # Bytes of the tensors that waited, each time that something was measured.
    kept: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tensors)

    def clear(self) -> None:
        self.tensors.clear()
        self.kept.clear()


@contextlib.contextmanager
def pretended(*, interpreted: bool = False, together: bool = True) -> Iterator[Launches]:
    """Checks in eager graphs measure as on a GPU.

    Args:
        interpreted: whether Triton's interpreter runs the kernels.
        together: whether values wait for each other; if not, each is read by a launch of its own.
    """
    launches = Launches()
    read, read_many, measure = gpu.read, gpu_table.read, waiting.measure

    def read_one(value: Tensor) -> gpu.Row | None:
        if not value.numel() or (not value.is_contiguous() and gpu.flattened(value) is None):
            return None
        launches.tensors.append(1)
        return read(value) if interpreted else row_of(value)

    def read_all(pieces: Sequence[gpu_table.Piece], rows: gpu.Rows, places: Sequence[int]) -> None:
        launches.tensors.append(len(pieces))
        if interpreted:
            read_many(pieces, rows, places)
            return
        for piece, place in zip(pieces, places, strict=True):
            write(rows, place, piece.tensor)

    def measured(what: waiting.Waiting) -> None:
        launches.kept.append(what.bytes)
        measure(what)

    how = waiting.Together(lambda example: isinstance(example, Tensor), measure=measured)
    way = dataclasses.replace(
        ways.EAGER,
        abs_min_max=eager.otherwise,
        takes=lambda example: False,  # what is on a GPU is not dense on a CPU
        together=how if together else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "is_readable", is_readable)
        not_in_c = types.SimpleNamespace(is_observed=native.is_observed, abs_min_max=lambda x: None)
        patch.setattr(finite, "native", not_in_c)
        patch.setattr(backward, "_read", lambda gradient: None)
        patch.setattr(_copies, "is_on_a_gpu", lambda value: isinstance(value, Tensor))
        patch.setattr(gpu, "cuda_device", lambda: None)
        patch.setattr(gpu, "read", read_one)
        patch.setattr(gpu_table, "read", read_all)
        patch.setattr(waiting, "measure", measured)
        patch.setattr(waiting, "_at_once", eager.otherwise)
        if not interpreted:
            patch.setattr(gpu, "_works", lambda device, dtype: True)
            patch.setattr(gpu_table, "works", lambda device, dtype, has_gaps: True)
        patch.setattr(ways, "EAGER", way)
        patch.setitem(ways.WAYS, "eager", way)
        yield launches


def is_readable(value: Any, dtypes: Container[torch.dtype] = gpu.BITS.keys()) -> bool:
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.dtype in dtypes
        and value.layout is torch.strided
        and not value.is_nested
    )


def row_of(value: Tensor) -> gpu.Row:
    rows, index = gpu.rows_for(1, value.device, gpu.BITS[value.dtype], 0)
    write(rows, index, value)
    return gpu.Row(rows.numbers, index)


def write(rows: gpu.Rows, index: int, value: Tensor) -> None:
    """What a kernel does, by torch's operations."""
    with torch.inference_mode(False), torch.no_grad():
        rows.numbers[index] = torch.stack([*traceable.abs_min_max(value)])
