"""Fingerprints of tensors in traces: how a file holds them, and how far apart two are.

Knows nothing of torch; :mod:`fxguard.measure.fingerprints` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxguard.formats import is_mask
from fxguard.records import Fingerprint, Row
from fxguard.report.frames_json import of_type

__all__ = ["SIGNS", "distance_of_elements", "fingerprints_of", "read_fingerprints"]

SIGNS = 1  # which sequences of signs: sums with others say nothing about each other
OTHER_SIGNS = "a fingerprint of another version of fxguard"

# Elements that are off by roundings, each by itself: the difference of two sums of n elements, over
# sqrt(n), has the standard deviation of one rounding. Of a million such differences one is larger
# than five times that.
DEVIATIONS = 5.0


def fingerprints_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The fingerprints of a batch as its line of a file holds them; None where it has none.

    For each row ``[count, left out, mean, norm, projection, projection]``, with one item more, 1,
    for one of an eager run; the note that stands in their place; or null.
    """
    listed = [_as_json(row.fingerprint) for row in rows]
    return {"signs": SIGNS, "rows": listed} if any(each is not None for each in listed) else None


def _as_json(found: Fingerprint | None) -> Any:
    if found is None:
        return None
    if found.note:
        return found.note
    numbers = (found.mean, found.norm, *found.projections)
    counts = (found.count, found.left_out)
    more = [1] if found.of_eager_run else []
    return [*counts, *(float(f"{number:.7g}") for number in numbers), *more]


def read_fingerprints(data: Any, row_count: int) -> list[Fingerprint | None]:
    """The fingerprint of each row; what another version took is a note.

    Raises:
        ValueError: when this is not what :func:`fingerprints_of` gave.
        KeyError: likewise.
    """
    entry = of_type(data, dict)
    signs, listed = of_type(entry["signs"], int), of_type(entry["rows"], list)
    if len(listed) != row_count:
        raise ValueError("a batch has other fingerprints than rows")
    if signs != SIGNS:
        return [None if each is None else Fingerprint(note=OTHER_SIGNS) for each in listed]
    return list(map(_read, listed))


def _read(data: Any) -> Fingerprint | None:
    if data is None:
        return None
    if isinstance(data, str):
        return Fingerprint(note=data)
    count, left_out, *numbers = of_type(data, list)
    if len(numbers) not in (4, 5):
        raise ValueError(f"{len(numbers) + 2} items where there are 6 or 7")
    if not 0 <= of_type(left_out, int) <= of_type(count, int):
        raise ValueError(f"{left_out} of {count} elements cannot be left out")
    mean, norm, *projections = (float(of_type(number, float, int)) for number in numbers[:4])
    if not all(map(math.isfinite, (mean, norm, *projections))) or norm < 0:
        raise ValueError("the numbers of a fingerprint are finite, and no norm is negative")
    return Fingerprint(count, left_out, mean, norm, tuple(projections), len(numbers) == 5)


def distance_of_elements(a: Row, b: Row) -> float | None:
    """The difference between two fingerprints, on the scale of the difference of two ranges.

    The largest of ``|a.mean - b.mean|``, ``|a.rms - b.rms|`` and of the same of each projection,
    over the scale of the elements: the largest magnitude, or five times their root mean square if
    that is less. Why that compares with what one rounding may do to the largest magnitude: let each
    of ``n`` elements be off by ``e`` times the root mean square, independently. Then
    ``sum(s_i * x_i)`` is off by about ``sqrt(n) * e * rms``, a projection, which is that over
    ``sqrt(n)``, by ``e * rms`` for every ``n``, and the mean by less. Where all are off in one
    direction, a projection is off by ``e`` times itself, so that it counts for the scale, too.

    Returns:
        0 where fingerprints are equal; 1 where tensors have other numbers of elements; where other
        numbers of elements were left out (NaN, inf, masks), how far apart these are, relative to
        the larger one. None where a row has no fingerprint.
    """
    one, other = a.fingerprint, b.fingerprint
    if one is None or other is None or one.note or other.note:
        return None
    if one.count != other.count:
        return 1.0
    if one.left_out != other.left_out:
        return abs(one.left_out - other.left_out) / max(one.left_out, other.left_out)
    scale = max(_scale(a, one), _scale(b, other))
    pairs = [(one.rms, other.rms), *zip(one.projections, other.projections, strict=True)]
    found = [abs(x - y) / max(scale, abs(x), abs(y)) for x, y in pairs if x != y]
    if one.mean != other.mean:
        found.append(abs(one.mean - other.mean) / scale)
    return max(found, default=0.0)


def _scale(row: Row, found: Fingerprint) -> float:
    spread, largest = DEVIATIONS * found.rms, row.abs_max
    if largest is None or not math.isfinite(largest) or is_mask(row.dtype, largest):
        return spread  # it was left out
    return min(spread, largest)
