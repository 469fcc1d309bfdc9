"""The elements of a tensor that are compared from step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGE", "is_plain", "sample_of"]

LARGE = 2**16  # elements: of a larger tensor, so many are copied and compared
PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(value: Any) -> bool:
    """Whether it is a dense tensor of torch's own type, with memory."""
    return type(value) in PLAIN and value.layout is torch.strided and not value.is_meta


def sample_of(x: Tensor) -> Tensor:
    """All elements, or as many as are compared of a large tensor, evenly spread."""
    x = x.detach()
    return x if x.numel() <= LARGE else x.reshape(-1)[:: -(-x.numel() // LARGE)]
