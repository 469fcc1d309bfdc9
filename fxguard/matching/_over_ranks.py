"""A reduction over ranks behind which two programs compute the same: it was run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fxguard.matching._alignment import Alignment
from fxguard.matching._exact import made_by
from fxguard.matching._region import Budget
from fxguard.matching._sides import Between
from fxguard.matching._tried import Tried
from fxguard.recording.recorded import RANKS, Operation

__all__ = ["reduced_over_ranks"]

REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "largest": lambda x: x.amax(0),
}


def reduced_over_ranks(aligned: Alignment, between: Between, budget: Budget) -> Tried | None:
    """The value of one rank that has to be reduced over all; None if none takes a difference away.

    Args:
        aligned: both programs; B has several ranks.
        between: the difference.
        budget: how much may be computed.
    """
    ranks = aligned.recording.about.get(RANKS)
    side = between.mine
    run = None if ranks is None else side.run(budget)
    if run is None:
        return None
    # What a collective behind it would reduce once more is one rank's.
    is_reduced = any("reduce" in side.operations[at].label for at in side.region.operations)
    of_all = _of_all_ranks(aligned.recording.operations)
    for at in side.region.operations:
        for value in made_by(side.operations[at]):
            peers = of_all.get(value, [])
            found = [x for v in peers if (x := aligned.values.get(v)) is not None]
            shapes = {x.shape for x in found}
            if len(found) != ranks or len(shapes) != 1 or not found[0].is_floating_point():
                continue
            stacked = torch.stack(found)
            for how, reduced in REDUCTIONS.items():
                if budget.is_spent:
                    return None
                instead = dict.fromkeys([value] if is_reduced else peers, reduced(stacked))
                result = run.run(side.target, instead=instead)
                if result is not None and side.far(result) <= side.allowed:
                    text = f"with the {how} over ranks of {side.named(value)}"
                    return Tried("B", text, at)
    return None


def _of_all_ranks(operations: list[Operation]) -> dict[int, list[int]]:
    """For each value those that all ranks have in its place, in their order."""
    places: dict[object, dict[int, tuple[int, ...]]] = defaultdict(dict)
    times: dict[object, int] = defaultdict(int)
    for operation in operations:
        if operation.rank is None or operation.label:
            continue
        line = None if operation.source is None else operation.source.position
        key = operation.kind, operation.module, line
        which = times[operation.rank, key]
        times[operation.rank, key] += 1
        places[key, which][operation.rank] = tuple(made_by(operation))
    found: dict[int, list[int]] = {}
    for by_rank in places.values():
        for values in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=False):
            found.update((value, list(values)) for value in values)
    return found
