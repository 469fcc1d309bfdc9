"""Faults in a graph with checks: what a check reads is made NaN while a switch says so."""

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
    """Makes what a check reads NaN, when its switch says so, for everything that reads it too."""

    switch: Tensor  # shape [], int64: which check, -1 for none
    slots: dict[Check, int]
    planted: list[int] = field(default_factory=list)  # those for which there is a place

    def can_plant(self, check: Check, example: Any) -> bool:
        """Whether a NaN can stand there."""
        for index in check.path:
            example = example[index]
        return (
            isinstance(example, Tensor)
            and example.dtype in traceable.FLOATS
            and example.layout is torch.strided
            and not example.is_nested
        )


def plant(value: Tensor, switch: Tensor, slot: int) -> Tensor:
    """``value``, or NaN in each of its elements."""
    return torch.where(switch == slot, math.nan, value)
