"""Both programs around one difference, and around an earlier one from which it follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fxguard.matching._alignment import Alignment, Mismatch
from fxguard.matching._exact import made_by, roundoff
from fxguard.matching._layouts import apart, distance, layouts_of, nearest_layout
from fxguard.matching._region import Budget, Region, region_of
from fxguard.matching._tried import Side
from fxguard.recording.recorded import Operation, Recording
from fxguard.recording.replay import is_view, operation_named

__all__ = ["Between", "ends_of"]

IsEnd: TypeAlias = Callable[[int], bool]
MOVES = frozenset(
    [
        *("_to_copy", "_unsafe_view", "as_strided", "cat", "clone", "constant_pad_nd", "copy"),
        *("expand", "flip", "gather", "im2col", "index", "index_select", "repeat"),
        *("repeat_interleave", "roll", "stack"),
    ]
)
PAIRS = 120  # values of both programs that are tried for one another
NEAREST = 3  # values of A that are tried for one of B
LARGEST = 2**20  # elements of these
UNRELATED = 1.3  # a distance
NEAR = 0.5  # likewise: so near are values in the same layout only
SIZES = 1e-3  # of root mean squares: what is further apart is not compared by elements


def ends_of(aligned: Alignment, mismatch: Mismatch) -> tuple[IsEnd, IsEnd]:
    """Whether a value of B, and one of A, is in both programs, in front of a difference."""

    def is_same(value: int) -> bool:
        return value in aligned.same and value != mismatch.mine

    def is_seen(value: int) -> bool:
        known = aligned.seen.get(value)
        return known is not None and known < mismatch.operation and value != mismatch.theirs

    return is_same, is_seen


class Between:
    """What leads to a difference in both programs.

    Args:
        aligned: both programs.
        ends: whether a value of B, and one of A, is in both of them.
        pair: a value of B, and what A has in its place.
        is_all: whether nothing else makes the difference that was found.
    """

    def __init__(
        self,
        aligned: Alignment,
        ends: tuple[IsEnd, IsEnd],
        pair: tuple[int, int],
        *,
        is_all: bool = True,
    ) -> None:
        self.is_all = is_all
        self._aligned, self._ends, self._pair = aligned, ends, pair
        other = aligned.other
        x, whole = aligned.values[pair[0]], other.values[pair[1]]
        maker = aligned.made_by.get(pair[0])
        place = None if maker is None else aligned.recording.operations[maker].rank
        part = aligned.part_of(whole, x, place)
        y = whole if part is None else part
        cut = _cut(whole, y)
        regions = (
            region_of(pair[0], aligned.made_by, aligned.recording.operations, ends[0]),
            region_of(pair[1], other.made_by, other.recording.operations, ends[1]),
        )
        noise = max(self._noises(*regions), default=0.0)
        self.mine = Side(
            "B",
            aligned.recording.operations,
            regions[0],
            pair[0],
            x,
            noise,
            self._given,
            aligned.not_run,
            _names(aligned.recording, aligned.made_by),
            self._far_from(y, x),
        )
        far = self._far_from(x, y)
        self.theirs = Side(
            "A",
            other.recording.operations,
            regions[1],
            pair[1],
            whole,
            noise,
            other.values.get,
            other.not_run,
            _names(other.recording, other.made_by),
            lambda result: far(cut(result)),
        )

    @classmethod
    def at(cls, aligned: Alignment, mismatch: Mismatch) -> Between:
        """What leads to a difference that was found."""
        return cls(aligned, ends_of(aligned, mismatch), (mismatch.mine, mismatch.theirs))

    def narrowed(self, budget: Budget) -> Iterator[Between]:
        """The first pair of values behind which nothing else differs, and then all of it.

        Each once more with what only moved elements in front of it: values are looked for in any
        order of their elements, and it may be the order that differs.
        """
        found, is_all = self._first_pair(budget)
        if found is not None:
            yield Between(self._aligned, self._ends, found, is_all=is_all)
            yield Between(self._aligned, self._ends_behind_moves(), found, is_all=is_all)
        yield self
        yield Between(self._aligned, self._ends_behind_moves(), self._pair)

    def _ends_behind_moves(self) -> tuple[IsEnd, IsEnd]:
        """Likewise ends, but for values that an operation made that moves elements."""
        aligned = self._aligned
        return (
            _but_moved(self._ends[0], aligned.made_by, aligned.recording),
            _but_moved(self._ends[1], aligned.other.made_by, aligned.other.recording),
        )

    def _noises(self, mine: Region, theirs: Region) -> Iterator[float]:
        """The roundoff of each weight or table that the programs do not share."""
        aligned = self._aligned
        for value in (*mine.leaves, *mine.edges):
            yield aligned.noise_of(value)
        for value in theirs.leaves:
            yield roundoff(aligned.other.recording, value)

    def _far_from(self, target: Tensor, own: Tensor) -> Callable[[Tensor], float]:
        """How far a result is from a value of the other program.

        It is laid out as the program's own value, if that is near; else in any way.
        """
        size = _size(target)

        def layouts(x: Tensor) -> list[Tensor]:
            by_rows = self._aligned.laid_out(x, target)
            return [*layouts_of(x, target), *([] if by_rows is None else [by_rows])]

        nearest: int | None = None
        if own.numel() == target.numel():
            far_each = [distance(each, target) for each in layouts(own)]
            if far_each and min(far_each) < NEAR:
                nearest = far_each.index(min(far_each))

        def far(result: Tensor) -> float:
            if result.shape != own.shape or result.dtype != target.dtype:
                return 1.0
            if abs(_size(result) - size) > SIZES * size:
                return 1.0
            if nearest is not None:
                one = next(itertools.islice(layouts_of(result, target), nearest, None), None)
                return apart(layouts(result)[-1] if one is None else one, target)
            return min((apart(each, target) for each in layouts(result)), default=1.0)

        return far

    def _given(self, value: int) -> Tensor | None:
        """What a value of B holds for what follows: A's, where it was put right."""
        aligned = self._aligned
        return aligned.given.get(value, aligned.values.get(value))

    def _first_pair(self, budget: Budget) -> tuple[tuple[int, int] | None, bool]:
        """The first value of B, and one of A, whose difference is all of the difference.

        If there is none, as where a line runs in many places, the first that are alike.
        """
        mine, theirs = self.mine, self.theirs
        run, allowed = mine.run(budget), mine.allowed
        if run is None:
            return None, True
        others = [
            (value, x)
            for at in theirs.region.operations
            for value in made_by(theirs.operations[at])
            if value != theirs.target
            and not self._ends[1](value)
            and (x := theirs.given(value)) is not None
            and 1 < x.numel() <= LARGEST
        ]
        tried, alike = 0, None
        for value in run.made():
            x = mine.given(value)
            if x is None or value == mine.target or self._ends[0](value):
                continue
            for other, laid in _nearest(x, others):
                if tried == PAIRS or budget.is_spent:
                    return alike, False
                tried += 1
                alike = alike or (value, other)
                result = run.run(mine.target, instead={value: laid})
                if result is not None and mine.far(result) <= allowed:
                    return (value, other), True
        return alike, False


def _nearest(x: Tensor, others: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """The values of the other program that are like a value, in its layout; the nearest first."""
    found = []
    for other, y in others:
        if y.numel() == x.numel() and y.dtype == x.dtype:
            laid = nearest_layout(y, x)
            far = UNRELATED if laid is None else distance(laid, x)
            if laid is not None and far < UNRELATED:
                found.append((far, other, laid))
    found.sort(key=lambda each: each[0])
    return ((other, laid) for _, other, laid in found[:NEAREST])


def _cut(whole: Tensor, part: Tensor) -> Callable[[Tensor], Tensor]:
    """Takes of a tensor what a part, which is a view, is of a whole."""

    def cut(x: Tensor) -> Tensor:
        if part is whole or x.shape != whole.shape:
            return x
        held = torch.empty_like(whole).copy_(x)
        return held.as_strided(part.shape, part.stride(), part.storage_offset())

    return cut


def _names(recording: Recording, makers: Mapping[int, int]) -> Callable[[int], str]:
    leaves = {leaf.value: leaf.name for leaf in recording.leaves}

    def named(value: int) -> str:
        if value not in makers:
            return leaves.get(value) or "a tensor"
        operation = recording.operations[makers[value]]
        place = "" if operation.source is None else f" ({operation.source.place})"
        made = [x for x in operation.made if x is not None]
        which = f"result {made.index(value) + 1} of " if len(made) > 1 and value in made else ""
        return f"{which}{operation.kind.strip('_')}{place}"

    return named


def _but_moved(is_end: IsEnd, makers: Mapping[int, int], recording: Recording) -> IsEnd:
    def is_made_otherwise(value: int) -> bool:
        at = makers.get(value)
        return is_end(value) and (at is None or not _moves(recording.operations[at]))

    return is_made_otherwise


def _moves(operation: Operation) -> bool:
    """Whether an operation only moves or repeats elements."""
    overload = operation_named(operation.name)
    return operation.kind in MOVES or (overload is not None and is_view(overload))


def _size(x: Tensor) -> float:
    """The root of the sum of squares of finite elements."""
    x = x.to(torch.float64) if not x.is_complex() else torch.view_as_real(x)
    return float(torch.where(torch.isfinite(x), x, 0.0).norm())
