"""The cause of an event, and its evidence in plain sentences."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fxguard.history._by_name import is_of_ranks, selects
from fxguard.history._climbs import Climb
from fxguard.history._evidence import (
    beside,
    besides,
    furthest,
    in_a_row,
    listed,
    more_backwards,
    of_loss,
    other_writes,
)
from fxguard.history._first import Exit
from fxguard.history._given import given, kept_beside
from fxguard.history._grown import grown, rate_that_grew
from fxguard.history._out_of_band import BACK
from fxguard.history._said import said
from fxguard.history._series import ROW_SIZE, ROWS, SUMMED, Series
from fxguard.history._watch import STAYS
from fxguard.report.event import Cause, Event
from fxguard.report.in_words import percent, times

__all__ = ["explained", "growth", "is_by_elimination", "jump_of_growth"]

CAUSE: dict[str, Cause] = {
    "input": "data",
    "target": "data",
    "drift": "weights",
    "setting": "step",
    "state": "step",
    "gradient": "gradient",
    "step": "gradient",  # settings and states come before it, and did not leave their bands
    "backward": "gradient",
    "graph": "operation",
    "number": "operation",
    "operation": "operation",
}
OF_STATES = (
    "its gradient has grown less, and no setting and no largest element of a state has changed: "
    "look at the other elements of the states, and at what the step adds, such as a weight decay"
)
OF_SIZE = (
    "range and mean of {} are in their bands: look at what the code computes from its size, or has "
    "kept from the batches before"
)
OF_RANKS = "it brings what other ranks have made"
BEFORE_IT = "what runs before it is in its band"
OF_STEP = "'s step"
NORM = "the norm of all gradients"
FEW_DOUBLINGS = 16.0  # until a dtype ends: of more, one that was seen says little
HALF = 0.5  # of the octaves by which a step has grown
MOVED = 5.0  # deviations by which a loss has moved
MOVED_AND_STAYS = 2.5  # the same where it stays
JUST_NOW = 8  # lines, of which the first in which the loss has moved is that of its jump


def explained(
    series: list[Series],
    steps: list[int],
    table: Tensor,
    far: Tensor,
    exits: list[Exit],
    *,
    may_be_data: bool = True,
) -> Event:
    """The event that the last line shows.

    Args:
        series: the columns.
        steps: of the lines.
        table: the numbers.
        far: their distances from their bands, in deviations.
        exits: what left its band first, in order of execution: one at least.
        may_be_data: whether the batch may be to blame. If not, only what else left its band is.
    """
    others = [one for one in exits if CAUSE.get(series[one.place].kind) != "data"]
    left = exits if may_be_data else others or exits
    first = left[0]
    other = _other_code(series, table, first)
    if other is not None:
        first = replace(first, place=other)
    known, begin = series[first.place], steps[first.line]
    moved, loss = _moved(series, far, first.line)
    if known.kind == "loss":
        moved, loss = first.line, first.place
    cause, what, source = CAUSE.get(known.kind, "unknown"), known.what, known.source
    evidence = [said(series, steps, table, first)]
    evidence += other_writes(series, steps, table, left, first)
    if left[0].place != first.place:
        evidence.insert(0, said(series, steps, table, left[0]))
    is_given = may_be_data and other is None and not is_of_ranks(known)
    to_blame = given(series, table, known) if is_given else []
    computed = [] if may_be_data else _computed_inputs(series, exits)
    if computed and known.kind in ("operation", "loss"):
        cause, what, source = "operation", f"what computes {series[computed[0].place].what}", ""
        evidence = [said(series, steps, table, computed[0])]
    elif to_blame:
        names = [one.what for one in to_blame]
        cause, what = "data", in_a_row(names, "or")
        evidence.append(f"{BEFORE_IT}, as are range and mean of {in_a_row(names, 'and')}")
    elif known.detail in (ROWS, ROW_SIZE) and _is_of_size_alone(series, left):
        evidence.append(OF_SIZE.format(known.what))
    elif known.kind == "step" and not _follows_gradient(series, table, first):
        cause, what = "step", f"the optimizer's step on {known.what}"
        evidence.append(OF_STATES)
    elif known.detail == SUMMED:
        what = f"all that {known.what.removesuffix(OF_STEP)} steps"
    elif cause == "gradient" and (share := _share(series, left)) > 0.5:
        what = "all weights"
        evidence.append(f"so do those of {percent(share)} of the weights")
    elif cause == "gradient":
        if alike := _alike(series, left)[1:]:
            so = "so do those of" if len(alike) > 1 else "so does that of"
            evidence.append(f"{so} {listed(alike)}")
        evidence += beside(series, table, first)
    elif cause == "operation" and not left[0].is_alone:  # what it reads has nearly changed, too
        cause, what, source = "unknown", NORM, ""
        if loss is not None:
            what, source = series[loss].what, series[loss].source
        evidence = furthest(series, steps, far, first)
    elif is_of_ranks(known):
        evidence.append(OF_RANKS)
    elif cause == "operation":
        evidence += besides(kept_beside(series, table, known))
    elif cause == "unknown":
        evidence += furthest(series, steps, far, first)
    if other is None and known.kind != "number" and cause in ("gradient", "operation", "unknown"):
        rate = rate_that_grew(series, steps, table, first.line)
        if rate is not None:  # far, though never in one step
            cause, what, source = "step", rate[0], ""
            evidence.insert(0, rate[1])
    if known.kind != "setting":  # which nothing measured can have caused
        changed = (one for one in left[1:] if series[one.place].kind == "setting")
        evidence += [said(series, steps, table, one) for one in changed][:1]
    evidence += grown(series, steps, table, first.line)
    evidence += more_backwards(series, steps, table, first)
    if loss is not None and (loss, moved) != (first.place, first.line):  # else it is said
        evidence.append(of_loss(steps, table, moved, loss))
    lead = 0 if loss is None else steps[moved] - begin
    return Event(begin, cause, what, source, lead, tuple(evidence))


def _computed_inputs(series: list[Series], exits: list[Exit]) -> list[Exit]:
    """Inputs that left their bands though no batch is to blame: other weights compute them."""
    return [one for one in exits if series[one.place].kind == "input"]


def is_by_elimination(event: Event) -> bool:
    """Whether an event blames what is given, though no number of that has changed."""
    return event.cause == "data" and any(x.startswith(BEFORE_IT) for x in event.evidence)


def _is_of_size_alone(series: list[Series], exits: list[Exit]) -> bool:
    """Whether of what the model and its loss are given, nothing but the size has changed."""
    given = [series[one.place] for one in exits if series[one.place].kind in ("input", "target")]
    return all(one.detail in (ROWS, ROW_SIZE, "distinct") for one in given)


def _other_code(series: list[Series], table: Tensor, first: Exit) -> int | None:
    """The operation that runs since an operation came or went; None if neither is the case."""
    if series[first.place].kind != "operation":
        return None
    runs = table[: first.line + 1] == table[: first.line + 1]  # NaN is not measured
    before, now = runs[:-1].any(dim=0), runs[-1]
    if bool(before[first.place] & now[first.place]):
        return None
    came = [
        place
        for place, known in enumerate(series)
        if known.kind == "operation" and not selects(known)
        if bool(now[place] & ~before[place])
    ]
    return min(came, key=lambda place: series[place].order, default=first.place)


def _follows_gradient(series: list[Series], table: Tensor, step: Exit) -> bool:
    """Whether a weight's step has grown because its gradient has, as far as both are measured."""
    weight = series[step.place].what
    of_gradient = [
        place for place, one in enumerate(series) if one.is_gradient and one.what == weight
    ]
    if not of_gradient:
        return True
    grown = [_octaves_up(table[:, place], step.line) for place in (step.place, of_gradient[0])]
    return not grown[1] < HALF * grown[0]


def _octaves_up(column: Tensor, line: int) -> float:
    """By how many octaves a number is above the median of those before."""
    before = column[max(0, line - BACK) : line]
    before = before[before == before]
    return math.log2(float(column[line]) / float(before.median())) if len(before) else math.nan


def growth(known: Series, climb: Climb, begin: int, now: float) -> Event:
    """The event of a climb that began in a step, with the number that it has reached."""
    text = f"{known.what}: {now:.2g}, twice as large every {times(1 / climb.rate)} steps"
    if climb.ends * climb.rate <= FEW_DOUBLINGS:
        text += f": {known.dtype} ends in about {times(climb.ends)} steps"
    return Event(begin, "growth", known.what, known.source, evidence=(text,))


def jump_of_growth(
    series: list[Series], steps: list[int], table: Tensor, far: Tensor, climb: Climb, begin: int
) -> Event:
    """The event of a jump in the last line, while a series climbs."""
    told = growth(series[climb.place], climb, begin, float(table[-1, climb.place]))
    moved, loss = _moved(series, far, max(0, len(steps) - JUST_NOW))
    evidence = told.evidence
    if loss is not None:
        evidence += (of_loss(steps, table, moved, loss),)
    return replace(told, lead=steps[moved] - begin, evidence=evidence)


def _moved(series: list[Series], far: Tensor, begin: int) -> tuple[int, int | None]:
    """The first line in which a loss has moved, and the column of that loss."""
    losses = [place for place, known in enumerate(series) if known.kind == "loss"]
    for line in range(begin, len(far)):
        for place in losses:
            if float(far[line, place]) >= MOVED:
                return line, place
    for place in losses:  # it may have moved less, and stay there
        is_near = (far[begin:, place] < MOVED_AND_STAYS).nonzero().flatten().tolist()
        line = begin + is_near[-1] + 1 if is_near else begin
        if line <= len(far) - STAYS:
            return line, place
    return len(far) - 1, None


def _share(series: list[Series], exits: list[Exit]) -> float:
    """Of how many of the weights the gradients or the steps left their bands as the first did."""
    first = series[exits[0].place]
    of_all = sum((one.kind, one.detail) == (first.kind, first.detail) for one in series)
    return len(_alike(series, exits)) / of_all


def _alike(series: list[Series], exits: list[Exit]) -> list[Series]:
    """Of which weights the gradients or the steps left their bands as the first did, with it."""
    first = series[exits[0].place]
    found = [series[one.place] for one in exits]
    return [one for one in found if (one.kind, one.detail) == (first.kind, first.detail)]
