"""Which operation makes two programs part: the first one on each side that the other lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxguard.matching._alignment import Alignment, Mismatch
from fxguard.matching._by_weights import other_weights
from fxguard.matching._exact import inside, made_by
from fxguard.matching._layouts import distance, nearest_layout
from fxguard.matching._numbers import unlike_numbers
from fxguard.matching._over_ranks import reduced_over_ranks
from fxguard.matching._region import Budget, Region, region_of
from fxguard.matching._sides import Between, ends_of
from fxguard.matching._tried import Tried, exchanged_values, first_change, other_operand
from fxguard.recording.recorded import Leaf, Operation
from fxguard.recording.replay import reads_of

__all__ = ["Cause", "causes_of"]

RELATED = 1.2  # a distance: unrelated values are at 1.4
MOST = 200  # values of each side that are compared with those of the other
LARGEST = 2**20  # elements of one that is
TRIED = 4  # causes for which a change is looked for
ELEMENTS = 2**28  # that are computed for it


@dataclass(slots=True)
class Cause:
    """Where two programs part, with all that follows from it."""

    mine: int | None  # the operation, by number
    theirs: int | None
    leaf: Leaf | None  # the weight that differs, where that is it
    mismatches: list[Mismatch]
    tried: Tried | None = None  # what makes the programs compute the same there


def causes_of(aligned: Alignment, mismatches: Iterable[Mismatch]) -> list[Cause]:
    """The causes of some mismatches, in order of execution.

    Those of one operation are one, and those of the same two lines: of each layer, say.
    """
    by_operation: dict[object, Cause] = {}
    for mismatch in mismatches:
        cause = _cause_of(aligned, mismatch)
        _merge(by_operation, cause, cause.leaf or cause.mine)
    by_line: dict[object, Cause] = {}
    for cause in by_operation.values():
        lines = (
            _line_of(aligned.recording.operations, cause.mine),
            _line_of(aligned.other.recording.operations, cause.theirs),
        )
        _merge(by_line, cause, (cause.leaf, lines) if None not in lines else id(cause))
    found = list(by_line.values())
    budget = Budget(ELEMENTS)
    for cause in found[:TRIED]:
        _try(aligned, cause, budget)
    return found


def _try(aligned: Alignment, cause: Cause, budget: Budget) -> None:
    """Look for one change behind which the programs compute the same there."""
    around = list(Between.at(aligned, cause.mismatches[0]).narrowed(budget))
    cause.tried = reduced_over_ranks(aligned, around[-1], budget)
    if cause.tried is not None:
        cause.mine = cause.tried.operation
        return
    cause.tried = other_weights(aligned, around[-1], budget)
    if cause.tried is not None:
        return
    if cause.leaf is not None and len(aligned.twins[cause.leaf.value].of) == 1:
        cause.leaf = None  # not for it: a norm may be in the weights, say
    changes = (
        first_change(each.mine, each.theirs, budget, leaves_out=each.is_all) for each in around
    )
    sure = [each for each in around if each.is_all]
    exchanges = (exchanged_values(each.mine, budget) for each in sure)
    operands = (other_operand(each.mine, budget) for each in sure)
    for found in itertools.chain(changes, exchanges, operands):
        if found is None:
            continue
        cause.tried = found
        mine, theirs = found.operation, found.other
        if found.side == "A":
            mine, theirs = theirs, mine
        cause.mine = cause.mine if mine is None else mine
        cause.theirs = cause.theirs if theirs is None else theirs
        return


def _merge(found: dict[object, Cause], cause: Cause, key: object) -> None:
    known = found.setdefault(key, cause)
    if known is not cause:
        known.mismatches += cause.mismatches


def _line_of(operations: Sequence[Operation], number: int | None) -> object:
    source = operations[number].source if number is not None else None
    return None if source is None else source.position


def _cause_of(aligned: Alignment, mismatch: Mismatch) -> Cause:
    operations, others = aligned.recording.operations, aligned.other.recording.operations

    is_same, is_seen = ends_of(aligned, mismatch)
    mine = region_of(mismatch.mine, aligned.made_by, operations, is_same)
    theirs = region_of(mismatch.theirs, aligned.other.made_by, others, is_seen)
    leaf = _unlike_leaf(aligned, mine)
    first, other = (
        _first_unlike_numbers(aligned, mine, theirs)
        or _first_counterparts(aligned, mine, theirs, is_same, is_seen)
        or (None, None)
    )
    if first is None:
        first = _root(operations, mine, is_same)
        other = _their_root(aligned, first, theirs, is_seen)
    return Cause(first, other, leaf, [mismatch])


def _unlike_leaf(aligned: Alignment, region: Region) -> Leaf | None:
    """A weight that is near to one of the other program, and not equal."""
    for leaf in aligned.recording.leaves:
        twin = aligned.twins.get(leaf.value)
        if leaf.value in region.leaves and leaf.kind == "weight" and twin and not twin.is_whole:
            return leaf
    return None


def _root(
    operations: Sequence[Operation], region: Region, is_end: Callable[[int], bool]
) -> int | None:
    """The first operation of a region all of whose operands are in both programs."""
    roots = [
        at for at in region.operations if all(is_end(ref.value) for ref in reads_of(operations[at]))
    ]
    return min(roots or region.operations, default=None)


def _their_root(
    aligned: Alignment, root: int | None, region: Region, is_seen: Callable[[int], bool]
) -> int | None:
    operations = aligned.other.recording.operations
    if root is not None:
        mine = aligned.recording.operations[root]
        read = {x for ref in reads_of(mine) for x in aligned.same.get(ref.value, ())}
        alike = [
            at
            for at in region.operations
            if inside(at) in read or read & {ref.value for ref in reads_of(operations[at])}
        ]
        same = [at for at in alike if operations[at].kind.rstrip("_") == mine.kind.rstrip("_")]
        if same or alike:
            return min(same or alike)
    return _root(operations, region, is_seen)


def _first_unlike_numbers(
    aligned: Alignment, mine: Region, theirs: Region
) -> tuple[int, int] | None:
    """The first operation that differs from one of the other program in a number alone."""
    others = aligned.other.recording.operations
    for at in mine.operations:
        operation = aligned.recording.operations[at]
        read = [set(aligned.same.get(ref.value, ())) for ref in reads_of(operation)]
        if not read or not all(read):
            continue
        for other in theirs.operations:
            reads = [ref.value for ref in reads_of(others[other])]
            if (
                len(reads) == len(read)
                and all(value in known for value, known in zip(reads, read, strict=True))
                and unlike_numbers(others[other], operation)
            ):
                return at, other
    return None


def _first_counterparts(
    aligned: Alignment,
    mine: Region,
    theirs: Region,
    is_same: Callable[[int], bool],
    is_seen: Callable[[int], bool],
) -> tuple[int, int] | None:
    """The first operation whose result is like one of the other program's, and not equal to it."""
    others = list(
        _values(aligned.other.recording.operations, theirs, aligned.other.values, is_seen)
    )
    others += [(at, x) for at in theirs.operations for x in aligned.other.parts.get(at, ())]
    values = list(_values(aligned.recording.operations, mine, aligned.values, is_same))
    values += [(at, x) for at in mine.operations for x in aligned.parts.get(at, ())]
    for at, x in sorted(values, key=lambda each: each[0])[:MOST]:
        found: list[tuple[float, int]] = []
        for number, y in others[:MOST]:
            if y.numel() == x.numel() and y.is_floating_point() == x.is_floating_point():
                laid = nearest_layout(y, x)
                if laid is not None:
                    found.append((distance(laid, x), number))
        if found and min(found)[0] < RELATED:
            return at, min(found)[1]
    return None


def _values(
    operations: Sequence[Operation],
    region: Region,
    values: Mapping[int, Tensor],
    is_end: Callable[[int], bool],
) -> Iterator[tuple[int, Tensor]]:
    """The values that operations of a region made and that the other program does not have."""
    for at in region.operations:
        for value in made_by(operations[at]):
            x = values.get(value)
            if x is not None and not is_end(value) and 1 < x.numel() <= LARGEST:
                yield at, x
