"""How far each series is out of its band, given what it does while nothing happens."""

from __future__ import annotations

import torch
from torch import Tensor

from fxguard.history._bands import NO_DRIFT
from fxguard.history._bands import distances as distances_of
from fxguard.history._beside import beside_others
from fxguard.history._by_name import selects
from fxguard.history._series import ROWS, Series
from fxguard.history._watch import HUGE

__all__ = ["BACK", "OUT", "STRONG", "out_of_band", "raised"]

BACK = 64  # steps in which a cause is looked for
OUT, OUT_BELOW = 5.0, 6.0  # deviations above and below the median
BEYOND_USUAL = 1.25  # times as far as the series has been while nothing happened
STRONG = 1.6  # as far out as counts where it lasts one step only
LEAST = 0.5  # octaves by which a gradient or a step is above what is usual
BESIDE = 0.8  # the same, beside all other gradients
JUST_BEFORE = 4  # steps
PART = 0.5  # of the octaves by which a state has grown, or an operation has sunk
LITTLE = 2.0  # octaves
CHANGED = 0.04  # octaves: 3 %
CONSTANT = 32  # steps
RARELY = 0.05  # of the steps: what writes a weight so seldom, and now, has not done so by chance
MOSTLY = 0.95  # of the steps: an operation that runs in so many runs always
NOT_JUDGED = ("time", "weight")


def out_of_band(
    series: list[Series], values: Tensor, distances: Tensor, after: int
) -> tuple[Tensor, Tensor]:
    """How far each series is out of its band in the last 64 steps and in the one that is judged.

    Args:
        series: the columns.
        values: octaves, a line for each step; the last is the one in which something jumped.
        distances: of the values from their bands, in deviations.
        after: the last line of an earlier disturbance; -1 for none.

    Returns:
        A line for each of these steps: from 1 on a series is out of its band. And of which series
        something else than the optimizer writes the weight, in few steps or none.
    """
    start = max(after + 1, len(values) - 1 - BACK)
    rarely = _rarely_written(series, values[: max(1, start)])
    above, below = _limits(distances[after + 1 :], start - after - 1)
    above = above.masked_fill(rarely, OUT)  # at an earlier write it was as far, whatever came of it
    seen = distances[start:]
    out = torch.maximum(seen / above, -seen / below).nan_to_num(0.0)
    gradient = _largest_gradient(series, values)
    for place, known in enumerate(series):
        column, far = values[:, place], seen[:, place]
        out[:, place] *= _counts(known, column, far, gradient)
        if known.kind == "setting":  # such as that of a group that an optimizer did not have
            out[:, place] += (raised(column) + _came(column))[start:]
        elif known.kind == "operation" and not selects(known):
            out[:, place] += _came_or_went(column)[start:]
    _add_gradients_beside(out, series, values, after)
    return out, rarely


def _counts(known: Series, column: Tensor, far: Tensor, gradient: Tensor) -> Tensor:
    """In which of the last lines a series may make something jump, where it is out of its band.

    Args:
        known: the series.
        column: its octaves, in all lines.
        far: its distances, in the last lines.
        gradient: the octaves of the largest gradient, in all lines.
    """
    start = len(column) - len(far)
    if known.kind in NOT_JUDGED:
        return torch.zeros_like(far, dtype=torch.bool)
    if known.detail == ROWS or known.kind == "setting":
        return far > 0  # the last batch of an epoch is often a short one
    if known.kind in ("gradient", "step"):  # these always move
        return (far > 0) & ~(column[start:] < _usual(column, start) + LEAST)
    if known.kind == "state":
        return ~_is_of_gradients(column, gradient, start)
    if known.kind == "drift":
        return column[start:] > NO_DRIFT
    if known.kind in ("input", "operation", "target"):
        return ~_sinks(column, far, start)
    return torch.ones_like(far, dtype=torch.bool)


def _usual(column: Tensor, line: int) -> Tensor:
    """The median of the lines before one."""
    return column[max(0, line - BACK) : max(1, line)].nanmedian()


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
        middle = float(_usual(column, here))
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
    places = [at for at, known in enumerate(series) if known.is_gradient]
    if not places:
        return torch.full_like(values[:, 0], torch.nan)
    found = values[:, places].nan_to_num(-torch.inf).amax(dim=1)
    return found.masked_fill(found == -torch.inf, torch.nan)


def _is_of_gradients(state: Tensor, gradient: Tensor, start: int) -> Tensor:
    """In which lines a state of an optimizer has grown as the gradients that it is made of may do.

    The largest has grown by half as many octaves; or the state is less than four times what it was:
    a gradient of one weight in one step does that, measured or not, and a state keeps it for long.

    Args:
        state: its octaves, in all lines.
        gradient: those of the largest gradient.
        start: the first line that is looked at.
    """
    grown, by = (column[start:] - _usual(column, start) for column in (state, gradient))
    return (grown > 0) & ((grown < LITTLE) | (by >= PART * grown))


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
