"""How far each number of a series was from its band, for all steps at once, and the band itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.history._bands import in_octaves
from fxguard.history._series import Series
from fxguard.history._watch import ENOUGH, FLOOR, NORMAL, USUAL

__all__ = ["Distances", "alike", "distances", "octaves_of"]

EACH = 4  # rows that share a band, which moves slowly


@dataclass(frozen=True, slots=True)
class Distances:
    """Of each row of a series; NaN where it was not measured, or too little was before."""

    octaves: Tensor
    middle: Tensor  # of the band, in octaves
    deviation: Tensor
    distance: Tensor  # in deviations


def octaves_of(series: Series, numbers: array[float]) -> Tensor:
    """Numbers on the scale on which a series is judged."""
    return in_octaves(torch.frombuffer(numbers, dtype=torch.float64)[:, None], [series])[:, 0]


def distances(values: Tensor, stretches: Sequence[tuple[int, int]]) -> Distances:
    """The band of each row is made of the rows before that are as many steps long as it is.

    Args:
        values: octaves of a series, row by row.
        stretches: see :func:`alike`.
    """
    middle, deviation = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    for begin, end in stretches:
        part = values[begin:end]
        is_known = ~part.isnan()
        known = part[is_known]
        if len(known) <= ENOUGH:
            continue
        nothing = torch.full((USUAL,), torch.nan, dtype=values.dtype)
        before = torch.cat([nothing, known[:-1]]).unfold(0, USUAL, EACH)
        middles = before.nanmedian(dim=1).values
        distance = (before - middles[:, None]).abs_()
        deviations = distance.nanmedian(dim=1).values.mul_(NORMAL).clamp_(min=FLOOR)
        middles[: ENOUGH // EACH] = torch.nan
        middle[begin:end][is_known] = middles.repeat_interleave(EACH)[: len(known)]
        deviation[begin:end][is_known] = deviations.repeat_interleave(EACH)[: len(known)]
    return Distances(values, middle, deviation, (values - middle) / deviation)


def alike(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of rows that are about as many steps long: 1, 16, 256, ..."""
    kinds = [size.bit_length() // 4 for size in sizes]
    begin, found = 0, []
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[begin]:
            found.append((begin, place))
            begin = place
    return found
