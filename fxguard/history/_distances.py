"""How far each number of a series was from its band, for all steps at once, and the band itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.history._usual import ENOUGH, FLOOR, SCALE, USUAL

__all__ = ["Distances", "distances"]

EACH = 4  # rows that share a band, which moves slowly


@dataclass(frozen=True, slots=True)
class Distances:
    """Of each row of a series; NaN where it was not measured, or too little was before."""

    octaves: Tensor
    middle: Tensor  # of the band, in octaves
    deviation: Tensor
    distance: Tensor  # in deviations


def distances(octaves: Sequence[float], sizes: Sequence[int]) -> Distances:
    """The band of each row is made of the rows before that are as many steps long as it is.

    Args:
        octaves: of a series, row by row.
        sizes: how many steps each row stands for.
    """
    values = torch.frombuffer(array("d", octaves), dtype=torch.float64).float()
    middle, deviation = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    for begin, end in _alike(sizes):
        part = values[begin:end]
        is_known = ~part.isnan()
        known = part[is_known]
        if len(known) <= ENOUGH:
            continue
        nothing = torch.full((USUAL,), torch.nan)
        before = torch.cat([nothing, known[:-1]]).unfold(0, USUAL, EACH)
        middles = before.nanmedian(dim=1).values
        distance = (before - middles[:, None]).abs_()
        deviations = distance.nanmedian(dim=1).values.mul_(SCALE).clamp_(min=FLOOR)
        middles[: ENOUGH // EACH] = torch.nan
        middle[begin:end][is_known] = middles.repeat_interleave(EACH)[: len(known)]
        deviation[begin:end][is_known] = deviations.repeat_interleave(EACH)[: len(known)]
    return Distances(values, middle, deviation, (values - middle) / deviation)


def _alike(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of rows that are about as many steps long: 1, 16, 256, ..."""
    kinds = [size.bit_length() // 4 for size in sizes]
    begin = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[begin]:
            yield begin, place
            begin = place
