"""Plants faults in a graph with checks: a switch makes the value of a check NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard.measure import traceable
from fxguard.plan.plan import Check

__all__ = ["SWITCH", "Planting", "plant"]

SWITCH = "fxguard_switch"  # the buffer of a graph that holds the switch


@dataclass(slots=True)
class Planting:
    """Makes the value of a check NaN, also for its other readers, while its switch is on."""

    switch: Tensor  # shape [], int64: index of a check, -1 for none
    slots: dict[Check, int]
    planted: list[int] = field(default_factory=list)  # checks whose value can be planted

    def can_plant(self, check: Check, example: Any) -> bool:
        """Whether a NaN can be planted in the value of a check."""
        for index in check.path:
            example = example[index]
        return (
            isinstance(example, Tensor)
            and example.dtype in traceable.FLOATS
            and example.layout is torch.strided
            and not example.is_nested
        )


def plant(value: Tensor, switch: Tensor, slot: int) -> Tensor:
    """``value``, or NaN in all of its elements."""
    return torch.where(switch == slot, math.nan, value)
