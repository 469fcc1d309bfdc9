"""How much memory is free on a device, and whether copies of tensors fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["fits", "free_bytes", "has_room"]

SMALL = 2**26  # bytes: up to this size, free memory is not checked
SHARE = 4  # copies may take one part in this many of free memory

MEMORY = Path("/proc/meminfo")
GROUPS = [  # limit and use of the control group of a container, and what the use consists of
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
]


def has_room(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> bool:
    """Whether copies of tensors take no more than their share of free memory.

    Args:
        tensors: the tensors that would be copied.
        dtype: dtype of the copies; None for those of the tensors.
    """
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        needed[tensor.device] = needed.get(tensor.device, 0) + size
    return fits(needed)


def fits(needed: Mapping[torch.device, int]) -> bool:
    """Whether numbers of bytes take no more than their share of free memory."""
    return all(
        size <= SMALL or (free := free_bytes(device)) is None or size * SHARE <= free
        for device, size in needed.items()
    )


def free_bytes(device: torch.device) -> int | None:
    """How much memory is still available on a device; None if not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    free: list[int] = []
    if device.type == "cpu":
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = MEMORY.read_text().splitlines()
            available = next(line for line in lines if line.startswith("MemAvailable:"))
            free.append(int(available.split()[1]) * 1024)
        for folder, limit, used, of_files in GROUPS:
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                free.append(left + _of_files(folder, of_files))
    return min(free, default=None)


def _of_files(group: Path, name: str) -> int:
    """The bytes of a control group that are copies of files, and are given up when asked for."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (group / "memory.stat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name} ")).split()[1])
    return 0
