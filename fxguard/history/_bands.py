"""How far each series is from its own band, in each of the last steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxguard.history._series import Series
from fxguard.history._watch import ENOUGH, FLOOR, HUGE, NORMAL, TINY, USUAL

__all__ = ["NO_DRIFT", "distances", "in_octaves"]

NO_DRIFT = math.log2(1e-5)  # of a weight, relative to its norm: rounding


def in_octaves(numbers: Tensor, series: list[Series]) -> Tensor:
    """A table of numbers as log2 of their magnitudes.

    Means and plain numbers keep their sign, and shares are tenths. A negative setting, such as a
    learning rate that ascends, counts as infinite.

    Args:
        numbers: a line for each step, a column for each series.
    """
    found = numbers.abs().log2().clamp_(TINY, HUGE)
    for place, known in enumerate(series):
        column = numbers[:, place]
        if known.has_sign:
            usual = column.abs().nanmedian().clamp(min=1e-30)
            found[:, place] = column.sign() * (1 + column.abs() / usual).log2()
        elif known.detail == "share of zeros":
            found[:, place] = column * 10
        elif known.kind == "drift":
            found[:, place].clamp_(min=NO_DRIFT)
        elif known.kind == "setting":
            found[:, place][column < 0] = HUGE
    return found


def distances(values: Tensor) -> Tensor:
    """Of each value, its distance from the median of the 64 before it, in deviations.

    Args:
        values: octaves, a line for each step, a column for each series; NaN is not measured.

    Returns:
        The same shape; NaN where too little was measured before.
    """
    count = len(values)
    # What was measured moves to the end: some series are measured in every tenth step only.
    order = values.isnan().logical_not_().to(torch.int8).argsort(dim=0, stable=True)
    packed = values.gather(0, order).T.contiguous()
    found = torch.full_like(packed, torch.nan)
    for place in range(ENOUGH, count):
        before = packed[:, max(0, place - USUAL) : place]
        if not bool((before[:, -ENOUGH] == before[:, -ENOUGH]).any()):
            continue
        middle = before.nanmedian(dim=1, keepdim=True).values
        deviation = (before - middle).abs_().nanmedian(dim=1).values.mul_(NORMAL).clamp_(min=FLOOR)
        distance = (packed[:, place] - middle[:, 0]) / deviation
        found[:, place] = distance.where(before[:, -ENOUGH] == before[:, -ENOUGH], torch.nan)
    result = torch.full_like(values, torch.nan)
    result.scatter_(0, order, found.T)
    # What was not finite long ago says nothing about how far a series goes while all is well.
    long_ago = result[: max(0, count - USUAL - 1)]
    long_ago[values[: len(long_ago)] == HUGE] = torch.nan
    return result
