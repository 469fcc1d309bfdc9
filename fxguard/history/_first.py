"""What left its band first, in order of execution, before something jumped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.history._bands import NO_DRIFT
from fxguard.history._bands import distances as distances_of
from fxguard.history._beside import beside_others
from fxguard.history._series import BUFFER, ROWS, Series
from fxguard.history._watch import HUGE

__all__ = ["BACK", "OUT", "Exit", "first_exit", "raised"]

BACK = 64  # steps in which a cause is looked for
OUT, OUT_BELOW = 5.0, 6.0  # deviations above and below the median
BEYOND_USUAL = 1.25  # times as far as the series has been while nothing happened
NEARLY = 0.6  # as far as what is first
CLEARLY = 1.3  # the same, for what is first in its step
STRONG = 1.6  # the same, for what lasts one step only
LEAST = 0.5  # octaves by which a gradient or a step is above what is usual
BESIDE = 0.8  # the same, beside all other gradients
JUST_BEFORE = 4  # steps
PART = 0.5  # of the octaves by which a state has grown, or an operation has sunk
CHANGED = 0.04  # octaves: 3 %
CONSTANT = 32  # steps
RARELY = 0.05  # of the steps: what writes a weight so seldom, and now, has not done so by chance
MOSTLY = 0.95  # of the steps: an operation that runs in so many runs always
GAP = 2  # steps in which nothing is out, within one disturbance

# Within a step. A weight that nothing but the optimizer used to write has been written before it.
PHASE = {
    "input": 1,
    "graph": 2,  # and its order is before that of operations
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
        series: the columns.
        values: octaves, a line for each step; the last is the one in which something jumped.
        distances: of the values from their bands, in deviations.
        after: the last line of an earlier disturbance; -1 for none.

    Returns:
        What left its band in the first step of the disturbance, in order of execution. Empty if
        nothing did.
    """
    count = len(values)
    start = max(after + 1, count - 1 - BACK)
    rarely = _rarely_written(series, values[: max(1, start)])
    above, below = _limits(distances[after + 1 :], start - after - 1)
    above = above.masked_fill(rarely, OUT)  # at an earlier write it was as far, whatever came of it
    seen = distances[start:]
    out = torch.maximum(seen / above, -seen / below).nan_to_num(0.0)
    phases = [PHASE.get(known.kind, -1) for known in series]
    gradient = _largest_gradient(series, values)
    for place, known in enumerate(series):
        if phases[place] < 0:
            out[:, place] = 0
        if known.kind in ("input", "operation", "target"):
            out[:, place] *= ~_sinks(values[:, place], seen[:, place], start)
        if known.detail == ROWS:
            out[:, place] *= seen[:, place] > 0  # the last batch of an epoch is often a short one
        elif known.kind in ("setting", "gradient", "step"):
            out[:, place] *= seen[:, place] > 0  # what becomes smaller makes nothing jump
            if known.kind == "setting":  # such as that of a group that an optimizer did not have
                out[:, place] += raised(values[:, place])[start:] + _came(values[:, place])[start:]
            else:  # these always move
                before = values[max(0, start - BACK) : max(1, start), place].nanmedian()
                out[:, place] *= ~(values[start:, place] < before + LEAST)
        elif known.kind == "state":
            out[:, place] *= ~_follows(values[:, place], gradient, start)
            out[:, place] *= ~_grows_little(values[:, place], start)
        elif known.kind == "operation":
            out[:, place] += _came_or_went(values[:, place])[start:]
        elif known.kind == "drift":
            out[:, place] *= values[start:, place] > NO_DRIFT
    _add_gradients_beside(out, series, values, after)
    begin = _begin(out)
    found = [
        Exit(
            start + begin,
            place,
            float(seen[begin, place]),
            bool(rarely[place]),
            _is_alone(series, out[begin].tolist(), place),
        )
        for place in range(len(series))
        if out[begin, place] >= 1
    ]

    def order(one: Exit) -> tuple[int, float, int, int]:
        known = series[one.place]
        is_before = one.is_rare_write or known.detail == BUFFER
        phase = WRITTEN if is_before else phases[one.place]
        size = -one.distance if known.detail == BUFFER else 0.0
        if known.kind == "setting" and known.what.startswith(RATE):  # of several, what matters most
            size = -1.0
        return phase, size, known.order, one.place

    found.sort(key=order)
    clear = [one for one in found if out[begin, one.place] >= CLEARLY]
    return clear or found


def _is_alone(series: list[Series], out: list[float], place: int) -> bool:
    """Whether no operation that runs before one in its step is nearly as far from its band."""
    known = series[place]
    return known.kind != "operation" or not any(
        one.kind == "operation" and one.order < known.order and far >= NEARLY * out[place]
        for one, far in zip(series, out, strict=True)
    )


def _limits(distances: Tensor, calm: int) -> tuple[Tensor, Tensor]:
    """How far each series may be above and below its median, given those of so many calm lines."""
    known = distances[:calm].nan_to_num(0.0)
    above = known.clamp(min=0).amax(dim=0) if calm else 0 * distances[-1]
    below = known.clamp(max=0).amin(dim=0) if calm else 0 * distances[-1]
    above = (BEYOND_USUAL * above.nan_to_num(0.0)).clamp(min=OUT)
    return above, (-BEYOND_USUAL * below.nan_to_num(0.0)).clamp(min=OUT_BELOW)


def _add_gradients_beside(out: Tensor, series: list[Series], values: Tensor, after: int) -> None:
    """Let gradients count that have grown beside the others, for more than a step."""
    places, beside = beside_others(series, values)
    if not places:
        return
    start = len(values) - len(out)
    far = distances_of(beside)
    above, _ = _limits(far[after + 1 :], start - after - 1)
    before = beside[max(0, start - BACK) : max(1, start)].nanmedian(dim=0).values
    found = (far[start:] / above).nan_to_num(0.0)
    found *= beside[start:] > before + BESIDE
    found[:-1] = torch.minimum(found[:-1], found[1:])
    out[:, places] = torch.maximum(out[:, places], found)


def _sinks(column: Tensor, distances: Tensor, start: int) -> Tensor:
    """In which lines a series is below its band because it has sunk there, step by step.

    Args:
        column: its octaves, in all lines.
        distances: from the line on that is looked at first.
        start: that line.
    """
    found = distances < 0
    for line in found.nonzero().flatten().tolist():
        here = start + line
        middle = float(column[max(0, here - BACK) : here].nanmedian())
        just_before = float(column[max(0, here - JUST_BEFORE) : here].nanmedian())
        found[line] = just_before - float(column[here]) < PART * (middle - float(column[here]))
    return found


def _rarely_written(series: list[Series], before: Tensor) -> Tensor:
    """Of which series something else than the optimizer writes the weight, in few steps or none."""
    drifts = torch.tensor([known.kind == "drift" for known in series])
    written = before > NO_DRIFT  # NaN is not measured
    return drifts & (written.double().mean(dim=0) <= RARELY)


def _largest_gradient(series: list[Series], values: Tensor) -> Tensor:
    """The octaves of the norm of the largest gradient, line by line; NaN where there is none."""
    places = [at for at, x in enumerate(series) if x.kind == "gradient" and not x.detail]
    if not places:
        return torch.full_like(values[:, 0], torch.nan)
    found = values[:, places].nan_to_num(-torch.inf).amax(dim=1)
    return found.masked_fill(found == -torch.inf, torch.nan)


def _follows(state: Tensor, gradient: Tensor, start: int) -> Tensor:
    """In which lines a state of an optimizer has grown as the gradients that it is made of have.

    Args:
        state: its octaves, in all lines.
        gradient: those of the largest gradient.
        start: the first line that is looked at.
    """
    grown = [
        column[start:] - column[max(0, start - BACK) : max(1, start)].nanmedian()
        for column in (state, gradient)
    ]
    return (grown[0] > 0) & (grown[1] >= PART * grown[0])


def _grows_little(state: Tensor, start: int) -> Tensor:
    """In which lines a state is less than twice what it was: gradients do that, measured or not."""
    grown = state[start:] - state[max(0, start - BACK) : max(1, start)].nanmedian()
    return (grown > 0) & (grown < 1)


def raised(column: Tensor) -> Tensor:
    """How clearly a setting that was constant becomes larger, or any one negative.

    Args:
        column: its octaves.
    """
    found = torch.zeros_like(column)
    found[1:][(column[1:] == HUGE) & (column[:-1] < HUGE)] = STRONG  # it became negative
    for line in (column[1:] > column[:-1] + CHANGED).nonzero().flatten().tolist():
        before = column[max(0, line + 1 - CONSTANT) : line + 1]
        if len(before) == CONSTANT and bool((before == before[0]).all()):
            found[line + 1] = STRONG
    return found


def _came(column: Tensor) -> Tensor:
    """How clearly something is measured for the first time, and always from then on.

    Args:
        column: its octaves; NaN where it was not measured.
    """
    runs = column == column
    found = torch.zeros_like(column)
    first = int(runs.to(torch.int8).argmax()) if bool(runs.any()) else 0
    if first > BACK // 2 and bool(runs[first:].all()):
        found[first] = STRONG
    return found


def _came_or_went(column: Tensor) -> Tensor:
    """How clearly an operation that always ran runs no more, or one runs for the first time.

    Args:
        column: its octaves; NaN where it did not run.
    """
    runs, found = column == column, _came(column)
    last = len(runs) - 1 - int(runs.flip(0).to(torch.int8).argmax())
    before = runs[max(0, last - BACK) : last + 1]
    if last < len(runs) - 1 and len(before) > BACK // 2 and float(before.double().mean()) > MOSTLY:
        found[last + 1] = STRONG
    return found


def _begin(out: Tensor) -> int:
    """The first step of the disturbance that goes on in the last line."""
    strong = (out >= STRONG).any(dim=1)
    lasting = (out[:-1] >= 1) & (out[1:] >= 1)
    lasts = torch.cat([lasting.any(dim=1), (out[-1:] >= 1).any(dim=1)])
    begin = last = len(out) - 1
    for line in range(last, -1, -1):
        if strong[line] or lasts[line]:
            begin = line
        elif begin - line > GAP:
            break
    return begin
