"""Statistics of a graph that runs inside another, as one of two branches or many times.

Like :mod:`fxguard.measure.traceable`, this is ordinary arithmetic without side effects. Statistics
have shape ``[count, 2]``: abs min and abs max of each measured value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fxguard.measure.traceable import NOT_RUN

__all__ = [
    "Slices",
    "among_others",
    "iterations",
    "next_iteration",
    "no_iteration",
    "slices",
    "worst_iteration",
]

# The states of a loop, kept in an extra row.
RUNS, DECIDED = 0.0, 1.0

Slices = tuple[tuple[int, int], ...]


def among_others(
    statistics: Tensor, before: int, after: int, wide: bool, like: Tensor | None
) -> Tensor:
    """The statistics of one branch, between rows saying that the other branch did not run.

    Args:
        statistics: statistics of the branch that runs, shape ``[count, 2]``.
        before: number of rows of a branch before it.
        after: number of rows of a branch after it.
        wide: whether the statistics of either branch are float64, since both must return one dtype.
        like: a tensor on the device of the branches; None for the CPU.
    """
    dtype = torch.float64 if wide else torch.float32
    device = torch.device("cpu") if like is None else like.device
    rows = [
        torch.full((before, 2), NOT_RUN, dtype=dtype, device=device),
        statistics.to(device, dtype),
        torch.full((after, 2), NOT_RUN, dtype=dtype, device=device),
    ]
    return torch.cat(rows)


# A loop keeps the joint numbers of all iterations up to the first one in which something turns bad;
# then the numbers of that iteration say where. Later iterations only inherit it.


def no_iteration(count: int, wide: bool, like: Tensor | None) -> Tensor:
    """A loop's statistics before it runs, shape ``[count + 1, 2]``."""
    dtype = torch.float64 if wide else torch.float32
    device = torch.device("cpu") if like is None else like.device
    rows = torch.full((count, 2), NOT_RUN, dtype=dtype, device=device)
    return torch.cat([rows, torch.full((1, 2), RUNS, dtype=dtype, device=device)])


def next_iteration(before: Tensor, current: Tensor, unintended: Slices) -> Tensor:
    """A loop's statistics after one more iteration.

    Args:
        before: the statistics after the previous iteration, shape ``[count + 1, 2]``.
        current: the statistics of this iteration alone, shape ``[count, 2]``.
        unintended: the rows in which an inf was not written on purpose.
    """
    rows, state = before[:-1], before[-1:]
    current = current.to(before.device, before.dtype)
    decided = state == DECIDED
    bad = _is_bad(current[None], unintended)
    new = torch.where(bad, current, _range_of_all(torch.stack([rows, current])))
    state = torch.where(decided | bad, DECIDED, RUNS).to(before.dtype)
    return torch.cat([torch.where(decided, rows, new), state])


def iterations(statistics: Tensor) -> Tensor:
    """A loop's statistics after it has ended, shape ``[count, 2]``."""
    return statistics[:-1]


def worst_iteration(stacked: Tensor, unintended: Slices) -> Tensor:
    """A loop's statistics from those of all iterations, shape ``[iterations, count, 2]``."""
    bad = _is_bad(stacked, unintended)
    # The first one with the largest value.
    chosen = stacked.index_select(0, bad.to(torch.int32).argmax().view(1))[0]
    return torch.where(bad.any(), chosen, _range_of_all(stacked))


def slices(chosen: Iterable[bool]) -> Slices:
    """Runs of chosen positions, each as its beginning and its exclusive end."""
    positions = [position for position, is_chosen in enumerate(chosen) if is_chosen]
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return tuple(runs)


def _is_bad(stacked: Tensor, unintended: Slices) -> Tensor:
    """For each iteration, whether it holds NaN, or inf in one of the unintended rows."""
    highs = stacked[..., 1]
    bad = torch.isnan(highs).any(dim=1)
    for begin, end in unintended:
        bad = bad | torch.isinf(highs[:, begin:end]).any(dim=1)
    return bad


def _range_of_all(stacked: Tensor) -> Tensor:
    """One range for all iterations: the smallest and the largest magnitude in any of them."""
    lows, highs = stacked[..., 0], stacked[..., 1]
    lows = torch.where(highs < 0, math.inf, lows)  # a reason in place of a number
    high = highs.amax(dim=0)
    return torch.stack([torch.where(high < 0, high, lows.amin(dim=0)), high], dim=1)
