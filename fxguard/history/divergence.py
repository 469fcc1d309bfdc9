"""Two histories of the same training: the first number in which they differ.

Needs no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxguard.history._series import Series
from fxguard.history.history import History
from fxguard.history.track import Track
from fxguard.report.strict_json import recorded, strict_json

__all__ = ["TOLERANCE", "Apart", "Divergence", "compare_histories"]

TOLERANCE = 1e-6  # relative: sums that were added up in another order differ by less


@dataclass(frozen=True, slots=True)
class Apart:
    """A series in the first step in which its numbers differ."""

    series: Series
    step: int
    last_step: int  # the step itself, or the last one of a stretch of which extremes are kept
    a: tuple[float, float]  # smallest and largest
    b: tuple[float, float]
    difference: float  # the larger one of both, relative to the larger number

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **self.series.told(),
            "step": self.step,
            "last_step": self.last_step,
            "a": list(self.a),
            "b": list(self.b),
            "difference": self.difference,
        }


@dataclass(frozen=True, slots=True)
class Divergence:
    """What two histories have in common, and where they part.

    Example:
        >>> print(compare_histories(load_history("first"), load_history("second")))
    """

    a: str  # the folders
    b: str
    tolerance: float
    compared: int  # numbers, one for each series and step or stretch
    series: int  # that both have
    steps: tuple[int, int] | None  # the first and the last that were compared
    apart: tuple[Apart, ...]  # every series that differs, by its first step, in order of execution
    only_in_a: tuple[str, ...] = ()  # names of series
    only_in_b: tuple[str, ...] = ()

    @property
    def first(self) -> Apart | None:
        """The first number that differs; None if none does."""
        return self.apart[0] if self.apart else None

    @property
    def differs(self) -> bool:
        """Whether any number of both differs by more than the tolerance."""
        return bool(self.apart)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and all of it agrees."""
        return self.compared > 0 and not self.apart

    @property
    def verdict(self) -> list[str]:
        """Where they part, in lines."""
        return [*self._verdict(), *self._alone()]

    def _verdict(self) -> Iterator[str]:
        first = self.first
        if self.steps is None or not self.compared:
            yield "nothing to compare: no series has a step that is in both"
            return
        steps = f"steps {self.steps[0]} to {self.steps[1]}"
        if first is None:
            yield f"they agree in {steps}: {self.series} series, to {self.tolerance:g}"
            return
        yield f"they part at {_when(first)}: {first.series.name}"
        yield from _numbers(first)
        same = [each for each in self.apart[1:] if each.step == first.step]
        if same:
            names = ", ".join(each.series.name for each in same[:3])
            more = f" and {len(same) - 3} more" if len(same) > 3 else ""
            yield f"  in the same step, after it: {names}{more}"
        before = first.step - self.steps[0]
        agreed = f"the {before} steps before agree" if before else "it is the first one of both"
        yield f"  {agreed} to {self.tolerance:g}; {len(self.apart)} of {self.series} series part"

    def _alone(self) -> Iterator[str]:
        for side, names in (("A", self.only_in_a), ("B", self.only_in_b)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                yield f"  only in {side}: {', '.join(names[:3])}{more}"

    def __str__(self) -> str:
        return "\n".join([f"A: {self.a}", f"B: {self.b}", "", *self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return recorded(
            "divergence",
            {
                "a": self.a,
                "b": self.b,
                "tolerance": self.tolerance,
                "compared": self.compared,
                "series": self.series,
                "steps": None if self.steps is None else list(self.steps),
                "differs": self.differs,
                "agrees": self.agrees,
                "verdict": self.verdict,
                "apart": [each.to_dict() for each in self.apart],
                "only_in_a": list(self.only_in_a),
                "only_in_b": list(self.only_in_b),
            },
        )

    def to_json(self, indent: int | None = None) -> str:
        """The comparison as strict JSON.

        Args:
            indent: blanks for each level; None writes one line.
        """
        return strict_json(self.to_dict(), indent)


def compare_histories(a: History, b: History, tolerance: float = TOLERANCE) -> Divergence:
    """Compare two runs of the same training, step by step, from the first step that both have.

    Times are not compared, and numbers that one of both has not measured.

    Args:
        a: a history.
        b: another one.
        tolerance: how far apart two numbers may be, relative to the larger one.

    Raises:
        FxguardError: when a file is damaged.
    """
    apart, compared, shared = [], 0, 0
    first, last = math.inf, -math.inf
    for name, series in a.described.items():
        if series.kind == "time" or name not in b.described:
            continue
        shared += 1
        found = None
        in_both = a.get(name), b.get(name)
        if _are_equal(*in_both) and len(in_both[0]):
            compared += len(in_both[0])
            first, last = min(first, in_both[0].steps[0]), max(last, in_both[0].last_steps[-1])
            continue
        for (step, until), in_a, in_b in _pairs(*in_both):
            compared += 1
            first, last = min(first, step), max(last, until)
            difference = max(_relative(x, y) for x, y in zip(in_a, in_b, strict=True))
            if difference > tolerance:
                found = Apart(series, step, until, in_a, in_b, difference)
                break
        apart += [] if found is None else [found]
    apart.sort(key=lambda each: (each.step, each.series.order))
    return Divergence(
        str(a.folder),
        str(b.folder),
        tolerance,
        compared,
        shared,
        (int(first), int(last)) if compared else None,
        tuple(apart),
        tuple(_alone(a, b)),
        tuple(_alone(b, a)),
    )


def _are_equal(a: Track, b: Track) -> bool:
    """Whether all of both is the same: no number needs to be looked at then."""
    columns = ((a.steps, b.steps), (a.last_steps, b.last_steps), (a.low, b.low), (a.high, b.high))
    return all(x.tobytes() == y.tobytes() for x, y in columns)


Range = tuple[float, float]


def _pairs(a: Track, b: Track) -> Iterator[tuple[tuple[int, int], Range, Range]]:
    """The ranges of both in the same steps; several of one where the other has kept less."""
    i = j = 0
    while i < len(a) and j < len(b):
        step = max(a.steps[i], b.steps[j])
        until = max(a.last_steps[i], b.last_steps[j])
        to_a, to_b = bisect_right(a.last_steps, until), bisect_right(b.last_steps, until)
        is_whole = a.steps[i] == b.steps[j] and to_a > i and to_b > j
        if is_whole and a.last_steps[to_a - 1] == b.last_steps[to_b - 1] == until:
            in_a, in_b = _range(a, i, to_a), _range(b, j, to_b)
            if not (math.isnan(in_a[1]) or math.isnan(in_b[1])):
                yield (step, until), in_a, in_b
            i, j = to_a, to_b
        else:  # steps that are not in both
            begin = min((x for x in (a.steps[i], b.steps[j]) if x != step), default=a.steps[i])
            i += a.steps[i] == begin
            j += b.steps[j] == begin


def _range(track: Track, begin: int, end: int) -> Range:
    if end == begin + 1:
        return track.low[begin], track.high[begin]
    known = [i for i in range(begin, end) if not math.isnan(track.high[i])]
    return (
        min((track.low[i] for i in known), default=math.nan),
        max((track.high[i] for i in known), default=math.nan),
    )


def _relative(x: float, y: float) -> float:
    """How far apart two numbers are, relative to the larger one; 0 if one is not measured."""
    if x == y or math.isnan(x) or math.isnan(y):
        return 0.0
    larger = max(abs(x), abs(y))
    return math.inf if math.isinf(larger) else abs(x - y) / larger


def _alone(one: History, other: History) -> list[str]:
    return [name for name in one.described if name not in other.described]


def _when(each: Apart) -> str:
    if each.step == each.last_step:
        return f"step {each.step}"
    return f"one of the steps {each.step} to {each.last_step}"


def _numbers(each: Apart) -> Iterator[str]:
    for place, what in ((1, "largest"), (0, "smallest")):
        x, y = each.a[place], each.b[place]
        if place and each.a[0] == each.a[1] and each.b[0] == each.b[1]:
            what = "value"
        elif _relative(x, y) == 0:
            continue
        yield f"  {what}: {x:.9g} in A, {y:.9g} in B, {_relative(x, y):.1e} apart"
        if what == "value":
            return
