"""What this process holds of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxguard.measure.at_hand import has_memory
from fxguard.measure.traceable import inside
from fxguard.torch_names import is_of_func_level

__all__ = ["part_here"]

PLAIN = (Tensor, torch.nn.Parameter)


def part_here(value: Any) -> Tensor | None:
    """What this process holds of a tensor: a dense one with elements; None if there is none.

    Of a DTensor, that is its shard: nothing waits for other ranks.
    """
    if type(value) in PLAIN:
        if is_of_func_level(value):  # it has no memory of its own
            return None
        is_dense = value.layout is torch.strided and not value.is_meta
        return value if is_dense and value.numel() and has_memory(value) else None
    parts = inside(value) if isinstance(value, Tensor) else []
    return part_here(parts[0]) if len(parts) == 1 else None
