"""The magnitude ranges in a graph that Inductor compiles.

The reductions are those of :mod:`fxguard.stats`, which Inductor fuses into the loops that make the
values. To join their results is one call of an operation that it does not look into. It would
write each number of a ``stack`` into its place from inside the kernel that makes it, and copy the
others in kernels next to it; then no two layers of a model have a kernel in common any more, and
the C++ compiler runs for each of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxguard import regions, stats
from fxguard.stats import abs_min_max

__all__ = ["abs_min_max", "collect", "version"]


@torch.library.custom_op("fxguard::join", mutates_args=())
def join(numbers: Sequence[Tensor]) -> Tensor:
    """Pairs of numbers, shape [] each, as a tensor of shape ``[pairs, 2]``."""
    return stats.stacked(numbers)


@join.register_fake
def _(numbers: Sequence[Tensor]) -> Tensor:
    shape = (len(numbers) // 2, 2)
    device = stats.common_device(numbers)
    return torch.empty(shape, dtype=stats.common_dtype(numbers), device=device)


def collect(items: Sequence[stats.Pair | Tensor]) -> Tensor:
    """Join the results of many checks, as :func:`fxguard.stats.collect` does."""
    return stats.collect(items, join)


@functools.cache
def version() -> str | None:
    """What changes when the functions in a graph with checks do: a hash of their files.

    None where the package has no files to read, such as in an archive.
    """
    files = (stats.__file__, regions.__file__, __file__)
    try:
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    except OSError:
        return None
