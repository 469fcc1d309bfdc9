"""Fingerprints of tensors in traces: their form in files, and how far apart two are.

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

SIGNS = 1  # version of the sign sequences: sums with different ones cannot be compared
OTHER_SIGNS = "a fingerprint of another version of fxguard"

# If elements are off by independent roundings, the difference of two sums of n elements, over
# sqrt(n), has the standard deviation of one rounding. One in a million such differences is larger
# than five times that.
DEVIATIONS = 5.0


def fingerprints_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The fingerprints of a batch for its line in a file; None if it has none.

    Each row has ``[count, left out, mean, norm, projection, projection]``, with one more item, 1,
    for an eager run; or the note in place of the numbers; or null.
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
    """The fingerprint of each row; fingerprints of another version become a note.

    Raises:
        ValueError: when the data did not come from :func:`fingerprints_of`.
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

    This is the largest of ``|a.mean - b.mean|``, ``|a.rms - b.rms|`` and the same for each
    projection, over the scale of the elements: the largest magnitude, or five times their root mean
    square if that is less. It is comparable to the effect of one rounding on the largest magnitude,
    for the following reason. Let each of ``n`` elements be off by ``e`` times the root mean square,
    independently. Then ``sum(s_i * x_i)`` is off by about ``sqrt(n) * e * rms``. A projection,
    which is that sum over ``sqrt(n)``, is off by ``e * rms`` for every ``n``, and the mean by less.
    If all elements are off in one direction, a projection is off by ``e`` times itself, so it
    counts for the scale as well.

    Returns:
        0 if fingerprints are equal; 1 if tensors have different numbers of elements; if different
        numbers of elements were left out (NaN, inf, masks), the difference of these numbers,
        relative to the larger one. None if a row has no fingerprint.
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
        return spread  # the largest magnitude was left out
    return min(spread, largest)
