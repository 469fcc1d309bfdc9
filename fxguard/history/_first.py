"""What left its band first, in order of execution, before something jumped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.history._out_of_band import STRONG, out_of_band
from fxguard.history._series import BUFFER, Series

__all__ = ["RATE", "Exit", "first_exit"]

NEARLY = 0.6  # as far out as what is first
CLEARLY = 1.3  # as far out as what counts: what is first in its step
GAP = 2  # steps in which nothing is out, within one disturbance

# Within a step. A weight that nothing but the optimizer used to write has been written before it.
PHASE = {
    "input": 1,
    "graph": 2,  # and its order is before that of operations
    "number": 2,
    "operation": 2,
    "target": 2,
    "loss": 2,
    "backward": 3,
    "gradient": 4,
    "setting": 5,
    "state": 6,
    "step": 7,
    "drift": 8,
}
WRITTEN = 0
RATE = "learning rate"  # how its series begin


@dataclass(frozen=True, slots=True)
class Exit:
    """A series that left its band."""

    line: int  # of the table
    place: int  # of the series
    distance: float  # from the median, in deviations: negative below it
    is_rare_write: bool  # of a weight that nothing but the optimizer writes in most steps
    is_alone: bool = True  # no operation that runs before it in its step is nearly as far out


def first_exit(series: list[Series], values: Tensor, distances: Tensor, after: int) -> list[Exit]:
    """What left its band first in the disturbance that the last line is part of, and what else did.

    Args:
        series: see :func:`~fxguard.history._out_of_band.out_of_band`.
        values: likewise.
        distances: likewise.
        after: likewise.

    Returns:
        What left its band in the first step of the disturbance, in order of execution. Empty if
        nothing did.
    """
    out, rarely = out_of_band(series, values, distances, after)
    start = len(values) - len(out)
    begin = _begin(out)
    far = out[begin].tolist()
    found = [
        Exit(
            start + begin,
            place,
            float(distances[start + begin, place]),
            bool(rarely[place]),
            _is_alone(series, far, place),
        )
        for place in range(len(series))
        if far[place] >= 1
    ]

    def order(one: Exit) -> tuple[int, float, int, int]:
        known = series[one.place]
        is_before = one.is_rare_write or known.detail == BUFFER
        phase = WRITTEN if is_before else PHASE[known.kind]
        size = -one.distance if known.detail == BUFFER else 0.0
        if known.kind == "setting" and known.what.startswith(RATE):  # of several, what matters most
            size = -1.0
        return phase, size, known.order, one.place

    found.sort(key=order)
    clear = [one for one in found if far[one.place] >= CLEARLY]
    return clear or found


def _is_alone(series: list[Series], out: list[float], place: int) -> bool:
    """Whether no operation that runs before one in its step is nearly as far from its band."""
    known = series[place]
    return known.kind != "operation" or not any(
        one.kind == "operation" and one.order < known.order and far >= NEARLY * out[place]
        for one, far in zip(series, out, strict=True)
    )


def _begin(out: Tensor) -> int:
    """The first step of the disturbance that goes on in the last line."""
    strong = (out >= STRONG).any(dim=1)
    lasting = out[:-1].masked_fill(out[1:] < 1, 0.0)
    # One series among hundreds is a little out of its band by chance, just before all others are.
    lasts = (lasting >= CLEARLY).any(dim=1) | ((lasting >= 1).sum(dim=1) > 1)
    lasts = torch.cat([lasts, (out[-1:] >= 1).any(dim=1)])
    begin = last = len(out) - 1
    for line in range(last, -1, -1):
        if strong[line] or lasts[line]:
            begin = line
        elif begin - line > GAP:
            break
    return begin
