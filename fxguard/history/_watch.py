"""Whether one number jumps above what is usual for it: a loss, the norm of all gradients."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = [
    "ENOUGH",
    "FLOOR",
    "HUGE",
    "NORMAL",
    "STAYS",
    "TINY",
    "USUAL",
    "Watch",
    "band",
    "octaves",
]

USUAL = 64  # steps that say what is usual
ENOUGH = 12  # of them are needed
NORMAL = 1.4826  # the median of distances from the median becomes a standard deviation
FLOOR = 0.1  # of a deviation, in octaves: a series never counts as steadier than 7 %
WIDTH = 3  # steps whose mean is looked at
JUMP = 6.0  # deviations of that mean
BEYOND_USUAL = 1.25  # times as far as the series has been
FORGETS = 0.998  # in each step
LATER = 8  # steps after which a distance counts as one while nothing happened
JUMP_AT_ONCE = 14.0  # deviations of one step
ABOVE_ALL = 2.0  # octaves of one step above the highest of all before
JUMP_ABOVE_ALL = 7.0  # likewise, in deviations
RISES = 32  # steps in which a number may rise
STAYS = 8  # steps in which it is up
RISEN = 1.0  # octaves
STAYS_ABOVE = 0.1  # octaves that the lowest of these is above all of the 64 before
STAYS_UP = 0.4  # octaves that their median is above the median of those
JUMP_LASTING = 2.0  # likewise, in deviations
REFRESHED = 16  # steps after which what is usual is computed anew
LOCAL = 16  # steps just before, from which a number may step up
STEP_UP = 1.0  # octaves above their median
JUMP_UP = 8.0  # likewise, in deviations
TINY, HUGE = -200.0, 1100.0  # octaves that stand for zero and for infinity


def octaves(number: float) -> float:
    """log2 of the magnitude, with a number for zero and one for infinity."""
    if math.isnan(number):
        return math.nan
    magnitude = abs(number)
    if math.isinf(magnitude):
        return HUGE
    return max(TINY, math.log2(magnitude)) if magnitude else TINY


class Watch:
    """The numbers of one series, of which some are negative or not.

    Args:
        rises: whether it is also above its band when it has risen within dozens of steps, or has
            stepped up from where it was just before.
    """

    def __init__(self, *, rises: bool = False) -> None:
        self._rises = rises
        self._last: deque[float] = deque(maxlen=WIDTH)
        self._means: deque[float] = deque(maxlen=USUAL)
        self._raw: deque[float] = deque(maxlen=USUAL)
        self._long: deque[float] = deque(maxlen=USUAL + RISES)
        self._limit = math.inf
        self._limit_at_once = math.inf
        self._age = 0
        self._middle, self._deviation = 0.0, 1.0
        self._waiting: deque[float] = deque()
        self._furthest = 0.0  # from the median, in deviations, in the last hundreds of steps

    def jumps(self, number: float) -> bool:
        """Take the number of one step; whether it is above its band. NaN is not measured."""
        value = octaves(number)
        if math.isnan(value):
            return False
        if value == HUGE:
            return self.known == USUAL  # what is infinite says nothing about what is usual
        self._long.append(value)
        found = self.is_above(number) or self._has_risen() or self.stays_up
        self._last.append(value)
        mean = sum(self._last) / len(self._last)
        if self.known == USUAL:
            self._age += 1
            self._learn((mean - self._middle) / self._deviation, found)
        self._means.append(mean)
        self._raw.append(number)
        return found

    @property
    def known(self) -> int:
        """How many of the numbers are known that say what is usual: up to 64."""
        return len(self._means)

    @property
    def usual(self) -> float:
        """The median of the last numbers; NaN before the first."""
        return median(self._raw) if self._raw else math.nan

    def is_above(self, number: float) -> bool:
        """Whether the number of a step would be above the band; nothing is learned from it."""
        value = octaves(number)
        if not (self.known == USUAL and value < HUGE):  # NaN included
            return False
        if self._age % REFRESHED == 0:
            self._refresh()
        if not self._is_out(value):
            return False
        self._refresh()
        return self._is_out(value) and not self._is_usual_with_sign(number)

    def may_jump(self, number: float) -> bool:
        """Whether a number is so far above all others that the steps behind it may be, too."""
        value = octaves(number)
        if not (self.known == USUAL and value < HUGE):
            return False
        far = self._middle + JUMP * self._deviation
        return value > far and number > max(self._raw) and self._age > 0

    @property
    def stays_up(self) -> bool:
        """Whether each of the last steps is above all of many before: a jump that has lasted."""
        if not self._rises or len(self._long) < USUAL + STAYS or self._long[-1] <= self._middle:
            return False
        if min(self._raw) <= 0:
            return False
        known = [*self._long]
        before, last = known[-USUAL - STAYS : -STAYS], known[-STAYS:]
        if min(last) <= max(before) + STAYS_ABOVE:
            return False
        middle, deviation = band(before)
        up, was_up = median(last) - middle, median(before[-STAYS:]) - middle
        return up > max(STAYS_UP, JUMP_LASTING * deviation) and was_up < up / 2  # no slow rise

    def _has_risen(self) -> bool:
        """Whether the last steps are far above all of many before: a rise that no step shows."""
        if not self._rises or len(self._long) < USUAL + RISES:
            return False
        if self._long[-1] <= self._long[0] + RISEN or min(self._raw) <= 0:
            return False
        known = [*self._long]
        return min(known[-STAYS:]) > max(known[:USUAL]) + RISEN

    def _is_out(self, value: float) -> bool:
        last = [*self._last, value][-WIDTH:]
        mean = sum(last) / len(last)
        return mean > self._limit or value > self._limit_at_once or self._is_step_up(last)

    def _is_step_up(self, last: list[float]) -> bool:
        """Whether the last steps are far above those just before: while a series falls, its band is
        wide, and the number may be inside it.
        """
        if not self._rises:
            return False
        before = list(self._means)[-LOCAL - WIDTH + 1 : -WIDTH + 1]  # without a step of the last
        highest = max(before)
        if min(last) <= highest:  # in nearly all steps
            return False
        middle, deviation = band(before)
        least = max(middle + max(STEP_UP, JUMP_UP * deviation), highest + STEP_UP / 2)
        return sum(last) / len(last) > least

    def _learn(self, far: float, found: bool) -> None:
        """Note how far from its median a series goes while nothing happens."""
        if found:
            self._waiting.clear()
            return
        self._waiting.append(far)
        if len(self._waiting) > LATER:
            self._furthest = max(self._furthest * FORGETS, min(self._waiting.popleft(), JUMP))

    def _refresh(self) -> None:
        middle, deviation = band(list(self._means))
        self._middle, self._deviation = middle, deviation
        jump = max(JUMP, BEYOND_USUAL * self._furthest)
        self._limit = max(middle + jump * deviation, max(self._means) + FLOOR)
        highest = max(map(octaves, self._raw))
        self._limit_at_once = min(
            max(middle + JUMP_AT_ONCE * deviation, max(self._means) + 1.0),
            max(middle + JUMP_ABOVE_ALL * deviation, highest + ABOVE_ALL),
        )

    def _is_usual_with_sign(self, number: float) -> bool:
        """Whether a series that crosses zero is within its band as it is, not in octaves."""
        if min(self._raw) > 0 < number:
            return False
        middle, _ = band(list(self._raw))
        deviation = NORMAL * median([abs(known - middle) for known in self._raw])
        reach = max(JUMP_AT_ONCE * deviation, max(abs(known - middle) for known in self._raw))
        return abs(number - middle) <= reach


def band(values: list[float]) -> tuple[float, float]:
    """Median, and the deviation that a normal distribution of the same spread has."""
    middle = median(values)
    return middle, max(FLOOR, NORMAL * median([abs(value - middle) for value in values]))
