"""What the fingerprints of two traces tell about elements, as words. Knows nothing of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fxguard.records import Fingerprint, Row, RowRole
from fxguard.trace.batch_diff import BatchDiff, Match, RowPair, distance

__all__ = ["compared", "reason", "rows"]

RANGES = "compared: smallest and largest magnitudes"
NOT_ELEMENTS = f"{RANGES}; not compared: elements"
FINGERPRINTS = f"{RANGES}, and fingerprints (mean, norm, two sums with seeded signs)"
NOT_TAKEN = "no fingerprint was taken"  # of gradients, of optimizer steps, and in older files
EAGER_RUN = "its graphs once more in eager mode, not what a compiler made of them"


def compared(batches: Sequence[BatchDiff]) -> tuple[str, list[str]]:
    """What was compared, as the subject of a sentence and as lines.

    Args:
        batches: at least one.
    """
    pairs = [
        pair
        for batch in batches
        for match in batch.aligned
        for pair in match.of(RowRole.OUTPUT)
        if pair.distance is not None
    ]
    sides = {"A": [pair.a for pair in pairs], "B": [pair.b for pair in pairs]}
    lacking = [pair for pair in pairs if pair.elements is None]
    if len(lacking) == len(pairs):
        return "ranges", [NOT_ELEMENTS, *map(_why_none, sides.items())]
    lines = [FINGERPRINTS]
    if lacking:
        lines.append(f"{len(lacking)} of {len(pairs)} values by ranges only: {_reasons(lacking)}")
    for name, rows_of_side in sides.items():
        found = [row.fingerprint for row in rows_of_side if row.fingerprint is not None]
        if any(each.of_eager_run for each in found):
            lines.append(f"fingerprints of {name}: {EAGER_RUN}")
    return "ranges and fingerprints", lines


def _why_none(side: tuple[str, Sequence[Row]]) -> str:
    """Why no value of a trace could be compared by its fingerprint."""
    name, listed = side
    found = [row.fingerprint for row in listed if row.fingerprint is not None]
    if not found:
        return f"{name} has no fingerprints"
    notes = [each.note for each in found if each.note]
    return f"{name} has fingerprints of {len(found) - len(notes)} values{_counted(notes)}"


def _reasons(lacking: Sequence[RowPair]) -> str:
    """Why values have no fingerprint, with the first trace's reason before the second's."""
    return _counted(
        next(why for row in (pair.a, pair.b) if (why := _why(row))) for pair in lacking
    ).removeprefix("; ")


def _counted(reasons: Iterable[str]) -> str:
    counted = Counter(reasons)
    return "".join(f"; {why} ({count})" for why, count in counted.items())


def _why(row: Row) -> str:
    """Why a row has no fingerprint; "" if it has one."""
    return NOT_TAKEN if row.fingerprint is None else row.fingerprint.note


def reason(match: Match) -> str:
    """Why the first difference counts although its inputs do not differ."""
    read = [pair for pair in match.of(RowRole.INPUT) if pair.distance is not None]
    both = bool(read) and all(pair.elements is not None for pair in read)
    what = "ranges and fingerprints" if both else "ranges"
    text = f"the {what} of what it read agree, those of what it made do not"
    differing = [pair for pair in match.of(RowRole.OUTPUT) if pair.differs]
    if any(distance(pair.a, pair.b) == pair.distance for pair in differing):
        return text
    if both:
        return f"{text}: other elements, or another order or sign"
    return "the ranges of what it read and made agree; the elements that it made do not"


def rows(pair: RowPair) -> Iterator[str]:
    """Both fingerprints of a value, if it differs most by them."""
    if pair.differs and pair.elements == pair.distance:
        for name, row in (("A", pair.a), ("B", pair.b)):
            assert row.fingerprint is not None
            yield f"    {name}: {_text(row.fingerprint)}"


def _text(found: Fingerprint) -> str:
    sums = " ".join(f"{number:.5g}" for number in found.projections)
    text = f"mean {found.mean:.5g}, norm {found.norm:.5g}, signed sums {sums}"
    text += f", {found.count} elements"
    return f"{text}, {found.left_out} left out" if found.left_out else text
