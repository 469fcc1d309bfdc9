"""Series that climb: steadily, faster than before, to where they have never been."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.formats import FORMATS
from fxguard.history._rows import Rows
from fxguard.history._series import BUFFER, Series
from fxguard.history._watch import HUGE, TINY

__all__ = ["Climb", "Climbs", "begins"]

CLIMB = ("operation", "setting", "state", "weight")  # kinds that climb
BLOCK = 8  # steps of which the mean is taken
BLOCKS = 32  # that are kept
RISING = 5  # the last blocks, each above the one before
RISE = 0.25  # octaves between the first of those and the last, where many weights climb
MANY = 0.5  # of all weights
STEEP = 1.0  # the same for one series
STEEP_LONG = 2.0  # the same in blocks that are four times as long
STEADY = 0.4  # of the mean rise from block to block: the least
LASTING = 0.75  # of the rise between the first two of those: the rise between the last two
BEFORE = 17  # blocks: from the first of those to the rising ones a series was slower
FASTER = 3.0  # times the rate of the blocks before
OF_STATES = 4.0  # times as steep: states follow gradients, and some hold their squares
ENDED = 8  # blocks in which a series does not climb, after which its climb has ended
ABOUT = 0.8  # of the steepest rate: about as steep
GOES_ON = 0.3  # of the rate that was told: what is slower does not climb
NEAR = 6.0  # octaves below the end of a dtype
SOON = 1500.0  # steps before a dtype ends
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
        self._blocks = torch.full((BLOCKS, 0), torch.nan, dtype=torch.float64, device="cpu")
        self._counted = 0  # blocks
        self._still = 0  # blocks in which what was told did not climb
        self.told: Climb | None = None  # as it was told last, until it ends

    def seen(self, rows: Rows, series: list[Series], *, is_calm: bool) -> Climb | None:
        """Look at the rows, if the last of a block was added; return a climb that is to be told.

        Args:
            rows: those of the steps.
            series: their columns.
            is_calm: whether a climb may begin: nothing has jumped lately.
        """
        if rows.count % BLOCK:
            return None
        means = rows.block(BLOCK).abs().log2_().clamp_(TINY, HUGE).mean(dim=0)
        more = len(means) - self._blocks.shape[1]
        if more:
            unknown = self._blocks.new_full((BLOCKS, more), torch.nan)
            self._blocks = torch.cat([self._blocks, unknown], dim=1)
        self._blocks = torch.cat([self._blocks[1:], means[None]])
        self._counted += 1
        if self.told is not None:
            return self._again(self.told, series)
        if is_calm:
            self.told = _first(self._climbing(series), series)
        return self.told

    def _again(self, told: Climb, series: list[Series]) -> Climb | None:
        """The climb that was told, if its series has doubled since."""
        blocks = self._blocks[:, told.place]
        rate = float(blocks[-1] - blocks[-RISING]) / (RISING - 1) / BLOCK
        if not rate >= GOES_ON * told.rate:
            self._still += 1
            if self._still == ENDED:
                self.told = None
            return None
        self._still = 0
        level = float(blocks[-1])
        if level < told.level + 1:
            return None
        self.told = Climb(told.place, level, rate, _end(series[told.place], level, rate))
        return self.told

    def _climbing(self, series: list[Series]) -> list[Climb]:
        blocks = self._blocks[:, : len(series)]
        found = _steady(blocks, RISE, BLOCK, series)
        weights = [one for one in found if _is_weight(series[one.place])]
        many = 2
        if len(weights) >= many:
            many = max(many, round(MANY * sum(map(_is_weight, series))))
        kept = weights if len(weights) >= many else []
        for one in found:
            kind = series[one.place].kind
            least = STEEP * (OF_STATES if kind == "state" else 1)
            if kind != "weight" and one.rate * (RISING - 1) * BLOCK >= least:
                kept.append(one)
        if self._counted % 4 == 0:
            long = blocks.reshape(BLOCKS // 4, 4, -1).mean(dim=1)
            kept += _steady(long, STEEP_LONG, 4 * BLOCK, series)
            kept += _near_the_end(long, 4 * BLOCK, series)
        return list({one.place: one for one in kept}.values())


def _is_weight(series: Series) -> bool:
    return series.kind == "weight" and series.detail != BUFFER


def _first(climbing: list[Climb], series: list[Series]) -> Climb | None:
    """A setting of an optimizer, or what comes first in a step of the steepest."""
    steepest = max((one.rate for one in climbing), default=0.0)

    def order(one: Climb) -> tuple[bool, bool, int]:
        kind = series[one.place].kind
        return kind != "setting", one.rate < ABOUT * steepest, series[one.place].order

    return min(climbing, key=order, default=None)


def _near_the_end(blocks: Tensor, steps: int, series: list[Series]) -> list[Climb]:
    """Series that climb however slowly, and reach the end of their dtype before long."""
    found = []
    for place, known in enumerate(series):
        if (
            known.dtype
            and known.kind in CLIMB
            and _end(known, float(blocks[-1, place]), 1.0) < NEAR
        ):
            parts = blocks[:, place].reshape(4, -1).mean(dim=1)  # NaN if the run is too short
            rises = parts.diff()
            rate = float(parts[-1] - parts[0]) / 3 / (steps * len(blocks) / 4)
            level = float(blocks[-1, place])
            ends = _end(known, level, rate) if rate > 0 else math.inf
            if ends < SOON and float(rises.min()) >= STEADY * rate * steps * len(blocks) / 4:
                found.append(Climb(place, level, rate, ends))
    return found


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
        if kind == "state" and float(rise[place]) < OF_STATES * least:
            continue
        if kind in CLIMB and (kind != "operation" or level >= LEAST):
            rate = float(rise[place]) / (RISING - 1) / steps
            found.append(Climb(place, level, rate, _end(series[place], level, rate)))
    return found


def _end(series: Series, level: float, rate: float) -> float:
    """After how many steps the dtype of a series ends."""
    limits = FORMATS.get(series.dtype)
    return math.inf if limits is None else (math.log2(limits.max) - level) / rate


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
