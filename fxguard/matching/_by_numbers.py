"""Two recordings without elements: which values have the same five numbers, and where that ends.

Without elements nothing runs again, and a difference goes on to the end of a program. So the
programs part behind the last values that are the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from fxguard.recording.recorded import Recording, Value
from fxguard.recording.replay import is_view, operation_named, reads_of

__all__ = ["SameNumbers", "same_numbers"]

ENOUGH, ENOUGH_LOW = 1e-5, 2e-2  # relative; the latter for dtypes with few digits
LOW = 1e-5  # the roundoff of these
BITS = 1e-12


@dataclass(frozen=True, slots=True)
class SameNumbers:
    """What two recordings have in common, by the numbers of their values."""

    pairs: dict[int, int]  # values of B, and one of A for each
    mine: int | None  # the operation of B behind the last of these; None at its end
    theirs: int | None


def same_numbers(a: Recording, b: Recording) -> SameNumbers:
    """Find the values of B among those of A.

    Args:
        a: the one that is taken as given.
        b: the other one.
    """
    by_count: dict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(a.values):
        by_count[value.count].append(number)
    pairs: dict[int, int] = {}
    for number, value in enumerate(b.values):
        far = [(apart(a.values[x], value), x) for x in by_count[value.count]]
        if far and min(far)[0] <= enough(a.values[min(far)[1]], value):
            pairs[number] = min(far)[1]
    return SameNumbers(pairs, _behind(b, set(pairs)), _behind(a, set(pairs.values())))


def apart(x: Value, y: Value) -> float:
    """How far the numbers of two values are apart, relative to their sizes."""
    p, q = x.numbers, y.numbers
    if p.not_finite != q.not_finite:
        return float("inf")
    sizes = (q.sum_of_magnitudes, q.sum_of_magnitudes, q.sum_of_squares, q.largest)
    return max(
        abs(one - two) / (size or 1.0) for one, two, size in zip(p[:4], q[:4], sizes, strict=True)
    )


def enough(x: Value, y: Value) -> float:
    """How far numbers may be apart by roundings."""
    units = [torch.finfo(v.dtype).eps / 2 if v.dtype.is_floating_point else 0.0 for v in (x, y)]
    if not any(units):
        return BITS
    return ENOUGH_LOW if max(units) > LOW else ENOUGH


def _behind(recording: Recording, same: set[int]) -> int | None:
    """The first operation behind the last one that made one of some values.

    Those that only view a weight do not count: each stands where the weight is read.
    """
    of_weights = {leaf.value for leaf in recording.leaves if leaf.kind != "input"}
    found: int | None = None
    for number, operation in enumerate(recording.operations):
        made = {x for x in operation.made if x is not None}
        overload = operation_named(operation.name)
        views = overload is not None and is_view(overload)
        if views and all(ref.value in of_weights for ref in reads_of(operation)):
            of_weights |= made
        elif same & made:
            found = None
        elif found is None and not views:
            found = number
    return found
