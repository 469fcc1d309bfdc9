"""Weights of A in place of those of B, behind which two programs compute the same: it was run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fxguard.matching._alignment import Alignment
from fxguard.matching._layouts import apart
from fxguard.matching._region import Budget
from fxguard.matching._sides import Between
from fxguard.matching._tried import Tried

__all__ = ["other_weights"]

NAMED = 2  # weights
OTHER = 1e-6  # relative: nearer are roundings of a copy
MOST = 64  # runs


def other_weights(aligned: Alignment, between: Between, budget: Budget) -> Tried | None:
    """The weights of A that take a difference away; None if none do.

    Args:
        aligned: both programs.
        between: the difference.
        budget: how much may be computed.
    """
    side = between.mine
    run = side.run(budget)
    if run is None:
        return None
    names = {leaf.value: leaf.name for leaf in aligned.recording.leaves}
    of = {leaf.value: leaf.name for leaf in aligned.other.recording.leaves}
    for number, pairs in enumerate(_pairs(aligned, between)):
        if number == MOST or budget.is_spent:
            break
        instead = {mine: aligned.other.values[theirs] for mine, theirs in pairs.items()}
        after = run.run(side.target, instead=instead)
        if after is not None and side.far(after) <= side.allowed:
            said = [
                f"{of[theirs]} of A in place of {names[mine]}" for mine, theirs in pairs.items()
            ]
            more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
            return Tried("B", f"with {' and '.join(said[:NAMED])}{more}")
    return None


def _pairs(aligned: Alignment, between: Between) -> Iterator[dict[int, int]]:
    """Weights of B with what each may be in A: its twin, all twins, then others of its shape."""
    mine = _weights(between.mine.region.leaves + between.mine.region.edges, aligned.values)
    named = {leaf.value for leaf in aligned.recording.leaves if leaf.name}
    mine = {value: x for value, x in mine.items() if value in named}
    twins: dict[int, int] = {}
    for value, x in mine.items():
        twin = aligned.twins.get(value)
        theirs = None if twin is None else aligned.other.values.get(twin.of[0])
        if twin is not None and theirs is not None and _differs(theirs, x):
            twins[value] = twin.of[0]
    yield from ({value: theirs} for value, theirs in twins.items())
    if len(twins) > 1:
        yield twins
    region = between.theirs.region
    others = _weights(region.leaves + region.edges, aligned.other.values)
    named = {leaf.value for leaf in aligned.other.recording.leaves if leaf.name}
    for value, x in mine.items():
        for other, y in others.items():
            if other in named and twins.get(value) != other and _differs(y, x):
                yield {value: other}


def _weights(values: tuple[int, ...], held: dict[int, Tensor]) -> dict[int, Tensor]:
    return {value: held[value] for value in values if value in held}


def _differs(theirs: Tensor, mine: Tensor) -> bool:
    return theirs.shape == mine.shape and theirs.dtype == mine.dtype and apart(theirs, mine) > OTHER
