"""The step that runs: the numbers that it has made so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from fxguard.history._norms import Number
from fxguard.history._series import Kind, Row, Series
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.traceable import NOTES

__all__ = ["ORDER", "OpenStep", "as_range"]

# Where the series of each kind begin in the order of execution. What has written a weight since the
# last step did so before anything else ran.
KINDS: tuple[tuple[Kind, ...], ...] = (
    ("drift", "weight"),
    ("input",),
    ("graph",),
    ("number", "operation"),
    ("target",),
    ("loss",),
    ("backward",),
    ("gradient",),
    ("setting",),
    ("state",),
    ("step",),
    ("time",),
)
ORDER = {kind: place * 10**6 for place, kinds in enumerate(KINDS) for kind in kinds}
OF_LOSS = ORDER["target"] + 10**6 // 2


class _Later(NamedTuple):
    """A number that is still on its device."""

    series: int
    number: Tensor
    divisor: Tensor | None


def as_range(series: Sequence[int]) -> Sequence[int]:
    """The same positions, as a range if they follow one another."""
    whole = range(series[0], series[0] + len(series)) if series else range(0)
    return whole if list(whole) == list(series) else series


def _are_floats(numbers: Sequence[Number]) -> TypeGuard[Sequence[float]]:
    """Whether numbers are at hand: all of them are, or all are on a device."""
    return not numbers or isinstance(numbers[0], float)


def _float(number: Tensor | None) -> float | None:
    return None if number is None else float(number)


class OpenStep:
    """Collects the numbers of one step after the other.

    Args:
        register: is given each series that is new, in the order of their positions.
    """

    def __init__(self, register: Callable[[Series], object]) -> None:
        self._register = register
        self._known: dict[str, int] = {}  # by name
        self._asked: dict[tuple[str, str, str, str], int] = {}  # by what a name is made of
        self._low: list[float] = []
        self._high: list[float] = []
        self._later: list[_Later] = []

    def series(
        self,
        kind: Kind,
        what: str,
        source: str = "",
        *,
        detail: str = "",
        dtype: str = "",
        order: int | None = None,
        is_of_loss: bool = False,
    ) -> int:
        """The position of a series; it is registered if it is new.

        Args:
            kind: see :class:`~fxguard.history._series.Series`.
            what: likewise.
            source: likewise.
            detail: likewise.
            dtype: likewise.
            order: its position among those of its kind; behind all that are known if None.
            is_of_loss: whether it is of an operation that reads targets, and stands behind these.
        """
        asked = kind, what, source, detail
        found = self._asked.get(asked)
        if found is not None:
            return found
        says_kind = what.startswith(kind)  # "loss", "input ids", "targets", "graph of the model"
        name = " ".join(filter(None, ("" if says_kind else kind, what, source, detail)))
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = len(self._low)
            place = (OF_LOSS if is_of_loss else ORDER[kind]) + (found if order is None else order)
            self._low.append(math.nan)
            self._high.append(math.nan)
            self._register(Series(name, kind, what, source, place, detail, dtype))
        self._asked[asked] = found
        return found

    def note(self, series: int, low: float, high: float) -> None:
        """Add numbers to those that a series has in this step. NaN counts as a number."""
        if low != low or high != high:
            low, high = math.nan, math.inf
        known = self._high[series]
        if known != known:  # there are none
            self._low[series], self._high[series] = low, high
            return
        if not low >= self._low[series] and self._low[series] == self._low[series]:
            self._low[series] = low  # also NaN, which stays
        if high > known:
            self._high[series] = high

    def note_ranges(
        self, rows: Sequence[tuple[int, int]], numbers: Sequence[Sequence[float]]
    ) -> None:
        """Add the smallest and largest magnitude of each of some values, but for those with a note.

        Args:
            rows: of each value, its place among the numbers, and the position of its series.
            numbers: pairs.
        """
        lows, highs = self._low, self._high
        for at, series in rows:
            low, high = numbers[at]
            if high in NOTES:
                continue
            if low == low and high == high and highs[series] != highs[series]:  # mostly
                lows[series], highs[series] = low, high
            else:
                self.note(series, low, high)

    def later(self, series: int, number: Tensor, divisor: Tensor | None = None) -> None:
        """Add a number that stays on its device until the step ends.

        Args:
            series: the position of the series.
            number: a tensor of one element.
            divisor: what it is divided by; a quotient by 0 is 0.
        """
        self._later.append(_Later(series, number, divisor))

    def note_all(
        self, series: Sequence[int], numbers: Sequence[Number], by: Sequence[Number] | None = None
    ) -> None:
        """Add one number to each series, as it is or as a quotient; a quotient by 0 is 0.

        Args:
            series: their positions; a range takes least time.
            numbers: floats, or tensors of one element: all of one kind.
            by: divisors, of the same kind.
        """
        if not _are_floats(numbers) or not (by is None or _are_floats(by)):
            for at, number in enumerate(numbers):
                self._note_one(series[at], number, None if by is None else by[at])
            return
        floats = numbers
        if by is not None:
            floats = [x / y if y else 0.0 for x, y in zip(numbers, by, strict=True)]
        if isinstance(series, range) and not math.isnan(sum(floats)):
            part = slice(series.start, series.stop)
            if self._high[part] == [math.nan] * len(series):  # there are none: it is this NaN
                self._low[part] = self._high[part] = floats
                return
        for place, number in zip(series, floats, strict=True):
            self.note(place, number, number)

    def _note_one(self, series: int, number: Number, divisor: Number | None) -> None:
        if isinstance(number, Tensor):
            assert divisor is None or isinstance(divisor, Tensor)
            self.later(series, number, divisor)
        else:
            found = float(number if divisor is None else number / divisor if divisor else 0.0)
            self.note(series, found, found)

    def row(self, step: int) -> Row:
        """The numbers of the step, and begin another one."""
        self._fetch()
        row = Row(step, self._low, self._high)
        self._low, self._high = [math.nan] * len(row.low), [math.nan] * len(row.low)
        return row

    def _fetch(self) -> None:
        """Bring the numbers from their devices, in one transfer for each."""
        later, self._later = self._later, []
        by_device: dict[torch.device, list[_Later]] = {}
        for each in later:
            if each.number.is_cpu:
                self._note_one(each.series, float(each.number), _float(each.divisor))
            else:
                by_device.setdefault(each.number.device, []).append(each)
        with own_arithmetic():
            for found in by_device.values():
                tensors = [x for each in found for x in (each.number, each.divisor)]
                given = [x.reshape(()).double() for x in tensors if x is not None]
                numbers = iter(torch.stack(given).tolist())
                for each in found:
                    number = next(numbers)
                    by = None if each.divisor is None else next(numbers)
                    self._note_one(each.series, number, by)
