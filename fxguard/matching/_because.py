"""What is unlike about two operations where two programs part: numbers, weights, elements."""

from __future__ import annotations

from collections.abc import Iterator

from fxguard.matching._alignment import PRODUCTS, Alignment
from fxguard.matching._causes import Cause
from fxguard.matching._exact import weights_read
from fxguard.matching._numbers import numbers_of, unlike_numbers
from fxguard.recording.recorded import Leaf, Operation

__all__ = ["because"]

SAME = 1e-6  # relative to the largest element of a weight


def because(aligned: Alignment, cause: Cause) -> str:
    """What is known of a cause, as one line; "" for nothing."""
    return "; ".join(_because(aligned, cause))


def _because(aligned: Alignment, cause: Cause) -> Iterator[str]:
    if cause.leaf is not None:
        said = _of_leaf(aligned, cause.leaf)
        if said:
            yield said
    if (
        cause.mine is None
        or cause.theirs is None
        or cause.mine >= len(aligned.recording.operations)
    ):
        return
    mine = aligned.recording.operations[cause.mine]
    theirs = aligned.other.recording.operations[cause.theirs]
    yield from _of_numbers(theirs, mine)
    yield from _of_weights(aligned, theirs, mine)


def _of_leaf(aligned: Alignment, leaf: Leaf) -> str:
    twin, mine = aligned.twins[leaf.value], aligned.values.get(leaf.value)
    names = {each.value: each.name for each in aligned.other.recording.leaves}
    of = " and ".join(names.get(value, "?") for value in twin.of[:3])
    if mine is None:
        return ""
    theirs = aligned.other.values.get(twin.of[0]) if len(twin.of) == 1 else None
    if theirs is None or theirs.shape != mine.shape:
        return f"{leaf.name} of B is not {of} of A: some of it is no part of these"
    unlike = (theirs - mine).abs()
    count = int((unlike > SAME * float(theirs.abs().max())).sum())
    return (
        f"{leaf.name} of B is not {of} of A: {count} of {mine.numel()} elements differ, by up to "
        f"{float(unlike.max()):.2g}"
    )


def _of_numbers(theirs: Operation, mine: Operation) -> Iterator[str]:
    one, two = numbers_of(theirs), numbers_of(mine)
    for name in unlike_numbers(theirs, mine):
        of = "" if name in ("other", "self") else f"{name} is "
        yield f"{of}{one[name]} in A, {two[name]} in B"


def _of_weights(aligned: Alignment, theirs: Operation, mine: Operation) -> Iterator[str]:
    """Weights that only one of two operations reads, by the names of A."""
    names = {leaf.value: leaf.name for leaf in aligned.other.recording.leaves}
    if theirs.kind != mine.kind and not {theirs.kind, mine.kind} <= PRODUCTS:
        return
    one = weights_read(aligned.other.weights_in, theirs)
    two = weights_read(aligned.weights_in, mine)
    if not one or not two or one & two:
        return
    a, b = (" and ".join(sorted(names.get(x, "?") for x in each)[:3]) for each in (one, two))
    yield f"A reads {a}; what B reads holds {b} of A"
