"""Small real NaNs: what people write, and what a competent engineer would call the mistake.

Each is one function as it stands in somebody's model, with inputs for which it goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Story:
    """A model that goes wrong, and the verdict on it."""

    operation: str  # that made the first bad value: "div"
    cause: str  # as `Origin.cause` has it
    forward: Callable[..., Any]  # a function or a module
    inputs: tuple[Tensor, ...]


def half(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


def single(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


def grid(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Numbers of no special kind, the same every time."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * (high - low) + low
