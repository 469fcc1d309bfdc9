"""The bits of weights, as one number for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.parts import part_here

__all__ = ["bits_of"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(weights: Sequence[Tensor]) -> list[int | None]:
    """The bits of each weight, added up; None of one that cannot be read."""
    found: list[int | None] = [None] * len(weights)
    by_device = defaultdict[torch.device, list[tuple[int, Tensor]]](list)
    with own_arithmetic():
        for at, weight in enumerate(weights):
            part = part_here(weight)
            if part is not None and part.element_size() in BITS and not part.is_complex():
                whole = part.detach().view(BITS[part.element_size()]).sum()
                by_device[whole.device].append((at, whole))
        for sums in by_device.values():  # one wait for each device
            numbers = torch.stack([whole for _, whole in sums]).tolist()
            for (at, _), number in zip(sums, numbers, strict=True):
                found[at] = number
    return found
