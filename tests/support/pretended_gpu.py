"""A CPU taken for a GPU, so that what would be launched there can be counted here.

With Triton's interpreter the kernels themselves run; without it torch's operations take their
place. What they read, and when, is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxguard.measure import eager, gpu, gpu_table, traceable, waiting, ways


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

    def read_all(elements: Sequence[Tensor]) -> list[gpu.Row]:
        launches.tensors.append(len(elements))
        return read_many(elements) if interpreted else [row_of(each) for each in elements]

    def measured(what: waiting.Waiting) -> None:
        launches.kept.append(what.bytes)
        measure(what)

    how = waiting.Together(lambda example: isinstance(example, Tensor), measure=measured)
    way = dataclasses.replace(
        ways.EAGER, abs_min_max=eager.otherwise, together=how if together else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "is_readable", is_readable)
        patch.setattr(gpu, "cuda_device", lambda: None)
        patch.setattr(gpu, "read", read_one)
        patch.setattr(gpu_table, "read", read_all)
        patch.setattr(waiting, "measure", measured)
        patch.setattr(waiting, "_at_once", eager.otherwise)
        if not interpreted:
            patch.setattr(gpu, "_works", lambda device, dtype: True)
            patch.setattr(gpu_table, "works", lambda device, dtype: True)
        patch.setattr(ways, "EAGER", way)
        patch.setitem(ways.WAYS, "eager", way)
        yield launches


def is_readable(value: Any) -> bool:
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.dtype in gpu.BITS
        and value.layout is torch.strided
        and not value.is_nested
    )


def row_of(value: Tensor) -> gpu.Row:
    with torch.no_grad():
        low, high = traceable.abs_min_max(value)
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        return gpu.Row(torch.stack([low, high]).to(wide).view(1, 2), 0)
