"""Compares two batches: which frames correspond, and how far apart their numbers are.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxguard.formats import is_mask
from fxguard.records import Frame, Row, RowRole
from fxguard.trace.align import align
from fxguard.trace.fingerprints import distance_of_elements
from fxguard.trace.trace import TracedBatch
from fxguard.trace.usual_change import UsualChange

__all__ = ["BatchDiff", "Match", "RowPair", "compare_batches", "distance", "ranked"]

# How far apart two magnitudes of the same operation may be, see `distance`: a few times the effect
# of rounding on the way through the models of the tests. A number that was rounded to a coarse
# dtype stays coarse, so the coarsest dtype of both traces counts.
TOLERANCES = {
    "float64": 1e-5,  # a trace file keeps six digits
    "complex128": 1e-5,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
COARSER = 0.5  # float8 and other dtypes with few bits


@dataclass(frozen=True, slots=True)
class RowPair:
    """The same value in both traces."""

    a: Row
    b: Row
    # The larger of the differences of ranges and of fingerprints; None if one has no number.
    distance: float | None
    differs: bool  # by more than the tolerance
    # See `distance_of_elements`; None if one of them has no fingerprint.
    elements: float | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """One operation, or one call of a module, in both traces or in only one."""

    a: Frame | None  # None if it is only in the second trace
    b: Frame | None
    rows: tuple[RowPair, ...] = ()
    # Beside what is usual; None without a history, or if that has no series of it.
    usual: UsualChange | None = None

    @property
    def frame(self) -> Frame:
        """The frame of the first trace, or else of the second."""
        frame = self.a or self.b
        assert frame is not None
        return frame

    @property
    def renamed_to(self) -> str | None:
        """The title in the second trace, if it is different."""
        if self.a is None or self.b is None or self.a.title == self.b.title:
            return None
        return self.b.title

    def of(self, role: RowRole) -> list[RowPair]:
        """The pairs of one role: what the operation read, made, or holds."""
        return [pair for pair in self.rows if pair.a.role is role]

    @property
    def distance(self) -> float:
        """The largest difference between the values that the operation made."""
        return max((pair.distance or 0.0 for pair in self.of(RowRole.OUTPUT)), default=0.0)

    @property
    def times_usual(self) -> float | None:
        """How many times the usual change the change is; None if nobody knows what is usual."""
        return None if self.usual is None else self.usual.times

    @property
    def differs(self) -> bool:
        """Whether ranges or fingerprints of what it made differ by more than the tolerance."""
        return any(pair.differs for pair in self.of(RowRole.OUTPUT))

    @property
    def compared(self) -> bool:
        """Whether there are numbers to compare."""
        return any(pair.distance is not None for pair in self.of(RowRole.OUTPUT))


@dataclass(frozen=True, slots=True)
class BatchDiff:
    """The comparison of two batches."""

    a: TracedBatch
    b: TracedBatch
    matches: tuple[Match, ...]  # in order; one in a single trace is where it would run

    @property
    def numbers(self) -> str:
        """``batch 149``, ``batch 149 against 150``."""
        a, b = self.a.number, self.b.number
        return f"batch {a}" + ("" if a == b else f" against {b}")

    @property
    def aligned(self) -> list[Match]:
        """The matches that are in both traces."""
        return [match for match in self.matches if match.a is not None and match.b is not None]

    @property
    def differing(self) -> list[Match]:
        """The matches in both traces whose outputs differ."""
        return [match for match in self.matches if match.differs]

    @property
    def only_in_a(self) -> list[Match]:
        """The frames that only the first batch has."""
        return [match for match in self.matches if match.b is None]

    @property
    def only_in_b(self) -> list[Match]:
        """The frames that only the second batch has."""
        return [match for match in self.matches if match.a is None]


def compare_batches(a: TracedBatch, b: TracedBatch, tolerance: float | None) -> BatchDiff:
    """Align two batches, and compare the frames that are in both.

    Args:
        a: a batch.
        b: another one.
        tolerance: how far apart two ranges may be, see :func:`distance`, and two fingerprints, see
            :func:`~fxguard.trace.fingerprints.distance_of_elements`; None for the effect of
            rounding.
    """
    allowed = _rounding(a, b) if tolerance is None else tolerance

    def same_numbers(x: Frame, y: Frame) -> bool:
        match = Match(x, y, tuple(_rows(x, y, allowed)))
        return match.compared and not match.differs

    matches = []
    next_a = next_b = 0
    for i, j in [*align(a.frames, b.frames, same_numbers), (len(a.frames), len(b.frames))]:
        matches += [Match(frame, None) for frame in a.frames[next_a:i]]
        matches += [Match(None, frame) for frame in b.frames[next_b:j]]
        if i < len(a.frames):
            x, y = a.frames[i], b.frames[j]
            matches.append(Match(x, y, tuple(_rows(x, y, allowed))))
        next_a, next_b = i + 1, j + 1
    return BatchDiff(a, b, tuple(matches))


def ranked(batches: Iterable[BatchDiff]) -> list[tuple[BatchDiff, Match]]:
    """The matches that differ, the one with the most times its usual change first.

    Those of which nobody knows what is usual come last, in order of execution.
    """
    differing = [(batch, match) for batch in batches for match in batch.differing]

    def place(each: tuple[BatchDiff, Match]) -> float:
        times = each[1].times_usual
        return 1.0 if times is None else -times

    return sorted(differing, key=place)


def _rounding(a: TracedBatch, b: TracedBatch) -> float:
    """The possible effect of rounding a number to the coarsest dtype."""
    dtypes = {row.dtype for batch in (a, b) for frame in batch.frames for row in frame.rows}
    inexact = [dtype for dtype in dtypes if "float" in dtype or "complex" in dtype]
    return max((TOLERANCES.get(d, COARSER) for d in inexact), default=TOLERANCES["float32"])


def _rows(x: Frame, y: Frame, tolerance: float) -> Iterator[RowPair]:
    """Pair rows by label; rows that graphs number differently by order, if counts are equal."""
    labels = {row.label: row for row in y.rows}
    for role in (RowRole.INPUT, RowRole.OUTPUT):
        in_x = [row for row in x.rows if row.role is role]
        in_y = [row for row in y.rows if row.role is role]
        if len(in_x) == len(in_y):
            labels |= {one.label: other for one, other in zip(in_x, in_y, strict=True)}
    for row in x.rows:
        if row.label in labels:
            yield _row_pair(row, labels[row.label], tolerance)


def _row_pair(a: Row, b: Row, tolerance: float) -> RowPair:
    difference = distance(a, b)
    if difference is None:
        return RowPair(a, b, None, False)
    elements = distance_of_elements(a, b)
    difference = max(difference, elements or 0.0)
    return RowPair(a, b, difference, difference > tolerance, elements)


def distance(a: Row, b: Row) -> float | None:
    """The difference between two ranges: 0 if they are equal, 1 if one is many times the other.

    ``max(|a.max - b.max|, |a.min - b.min|) / max(a.max, b.max)``: the smallest magnitude of a large
    tensor is accidental, so it counts only relative to the largest one. 0 also if both hold the
    largest number of their dtypes, which masks are made of. Infinite if one is worse than the other
    (finite < inf < NaN); None if one has no number.
    """
    low_a, high_a, low_b, high_b = a.abs_min, a.abs_max, b.abs_min, b.abs_max
    if low_a is None or high_a is None or low_b is None or high_b is None:
        return None
    if math.isnan(high_a) or math.isnan(high_b):
        return 0.0 if math.isnan(high_a) == math.isnan(high_b) else math.inf
    if high_a == high_b == math.inf or (_is_mask(a) and _is_mask(b)):
        return 0.0
    scale = max(high_a, high_b)
    if scale == math.inf:
        return math.inf
    return max(abs(high_a - high_b), abs(low_a - low_b)) / scale if scale else 0.0


def _is_mask(row: Row) -> bool:
    assert row.abs_max is not None
    return is_mask(row.dtype, row.abs_max)
