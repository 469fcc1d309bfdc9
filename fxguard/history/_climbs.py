"""Series that climb: steadily, faster than before, to where they have never been."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.formats import FORMATS
from fxguard.history._series import Series
from fxguard.history._watch import HUGE, TINY

__all__ = ["Climb", "Climbs", "begins"]

CLIMB = ("operation", "setting", "state", "weight")  # kinds that climb
BLOCK = 8  # steps of which the mean is taken
BLOCKS = 32  # that are kept
RISING = 5  # the last blocks, each above the one before
RISE = 0.25  # octaves between the first of those and the last, where many weights climb
MANY = 0.3  # of all weights
STEEP = 1.0  # the same for one series
STEEP_LONG = 2.0  # the same in blocks that are four times as long
STEADY = 0.4  # of the mean rise from block to block: the least
LASTING = 0.75  # of the rise between the first two of those: the rise between the last two
BEFORE = 17  # blocks: from the first of those to the rising ones a series was slower
FASTER = 3.0  # times the rate of the blocks before
ABOUT = 0.8  # of the steepest rate: about as steep
GOES_ON = 0.3  # of the rate that was told: a climb that is slower has ended
LEAST = 3.0  # octaves: operations whose numbers are smaller do no harm by climbing


@dataclass(frozen=True, slots=True)
class Climb:
    """A series that climbs."""

    place: int
    level: float  # octaves
    rate: float  # octaves in a step
    ends: float  # steps until the dtype ends; inf for none that is near


class Climbs:
    """Reads the numbers of each step, and looks at every eighth."""

    def __init__(self) -> None:
        self._sum = torch.zeros(64, dtype=torch.float64)
        self._blocks = torch.full((BLOCKS, 64), torch.nan, dtype=torch.float64)
        self._in_block = 0
        self._counted = 0  # blocks
        self.told: Climb | None = None  # as it was told last, until it ends

    def seen(self, numbers: Tensor, series: list[Series], *, is_calm: bool) -> Climb | None:
        """Take the numbers of a step; return a climb that is to be told.

        Args:
            numbers: one for each series.
            series: likewise.
            is_calm: whether a climb may begin: nothing has jumped lately.
        """
        width = len(numbers)
        if width > len(self._sum):
            self._widen(2 * width)
        self._sum[:width] += numbers.abs().log2_().clamp_(TINY, HUGE)
        self._sum[width:] = torch.nan
        self._in_block += 1
        if self._in_block < BLOCK:
            return None
        self._blocks = self._blocks.roll(-1, 0)
        self._blocks[-1] = self._sum / BLOCK
        self._sum.zero_()
        self._in_block = 0
        self._counted += 1
        if self.told is not None:
            return self._again(self.told, series)
        if is_calm:
            self.told = _first(self._climbing(series), series)
        return self.told

    def _widen(self, width: int) -> None:
        more = width - len(self._sum)
        self._sum = torch.cat([self._sum, self._sum.new_full((more,), torch.nan)])
        unknown = self._blocks.new_full((BLOCKS, more), torch.nan)
        self._blocks = torch.cat([self._blocks, unknown], dim=1)

    def _again(self, told: Climb, series: list[Series]) -> Climb | None:
        """The climb that was told, if its series has doubled since."""
        blocks = self._blocks[:, told.place]
        rate = float(blocks[-1] - blocks[-RISING]) / (RISING - 1) / BLOCK
        if not rate >= GOES_ON * told.rate:
            self.told = None
            return None
        level = float(blocks[-1])
        if level < told.level + 1:
            return None
        self.told = Climb(told.place, level, rate, _end(series[told.place], level, rate))
        return self.told

    def _climbing(self, series: list[Series]) -> list[Climb]:
        blocks = self._blocks[:, : len(series)]
        found = _steady(blocks, RISE, BLOCK, series)
        weights = [one for one in found if series[one.place].kind == "weight"]
        count = sum(known.kind == "weight" for known in series)
        kept = weights if len(weights) >= max(2, MANY * count) else []
        kept += [one for one in found if one.rate * (RISING - 1) * BLOCK >= STEEP]
        if self._counted % 4 == 0:
            long = blocks.reshape(BLOCKS // 4, 4, -1).mean(dim=1)
            kept += _steady(long, STEEP_LONG, 4 * BLOCK, series)
        return list({one.place: one for one in kept}.values())


def _first(climbing: list[Climb], series: list[Series]) -> Climb | None:
    """A setting of an optimizer, or what comes first in a step of the steepest."""
    steepest = max((one.rate for one in climbing), default=0.0)

    def order(one: Climb) -> tuple[bool, bool, int]:
        kind = series[one.place].kind
        return kind != "setting", one.rate < ABOUT * steepest, series[one.place].order

    return min(climbing, key=order, default=None)


def _steady(blocks: Tensor, least: float, steps: int, series: list[Series]) -> list[Climb]:
    """Series whose last blocks of so many steps rise by `least` octaves or more, ever on."""
    rises = blocks[1 - RISING :] - blocks[-RISING:-1]
    rise = blocks[-1] - blocks[-RISING]
    earlier = min(len(blocks), BEFORE)
    rate_before = (blocks[-RISING] - blocks[-earlier]) / (earlier - RISING)
    highest = blocks[: 1 - RISING].nan_to_num(-torch.inf).amax(dim=0)
    climbs = rise >= least
    climbs &= rises.amin(dim=0) >= STEADY * rise / (RISING - 1)
    climbs &= rises[-1] >= LASTING * rises[0]
    climbs &= rise / (RISING - 1) >= FASTER * rate_before
    climbs &= blocks[-1] > highest
    found = []
    for place in climbs.nonzero().flatten().tolist():
        kind, level = series[place].kind, float(blocks[-1, place])
        if kind in CLIMB and (kind != "operation" or level >= LEAST):
            rate = float(rise[place]) / (RISING - 1) / steps
            found.append(Climb(place, level, rate, _end(series[place], level, rate)))
    return found


def _end(series: Series, level: float, rate: float) -> float:
    limits = FORMATS.get(series.dtype)
    if limits is None:
        return torch.inf
    return (float(torch.tensor(limits.max, dtype=torch.float64).log2()) - level) / rate


def begins(values: Tensor) -> int:
    """Where a series bends upwards: the line of a table from which on it climbs.

    Args:
        values: octaves of the series, step by step; NaN is not measured.
    """
    known = values == values
    lines = known.nonzero().flatten()
    y, t = values[known], lines.double()
    count = len(y)
    best, found = torch.inf, count - 1
    for bend in range(4, count - 4):
        after = (t - t[bend]).clamp(min=0)
        columns = torch.stack([torch.ones_like(t), t, after], dim=1)
        fit = torch.linalg.lstsq(columns, y[:, None]).solution
        error = float(((columns @ fit)[:, 0] - y).square().sum())
        if error < best and float(fit[2]) > 0:
            best, found = error, bend
    return int(lines[found])
