"""Runs a graph again with all checks, after a run that only measured its outputs.

This is what ``replay=True`` does when a batch has turned bad. The second run starts with the inputs
and the random state of the first one, and its numbers count only if its outputs are the same as
before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.draws import Draws
from fxguard.batch.events import GraphRun, Postponed, expect_rows
from fxguard.forgiving import theirs
from fxguard.graph.wide_form import NotJudged
from fxguard.measure import eager, traceable
from fxguard.measure.at_hand import range_of
from fxguard.plan.plan import WHOLE_GRAPH, FramePlan, Plan, RowPlan, Step
from fxguard.records import NOT_MEASURED, Range, Role
from fxguard.rerun.differences import same_magnitude
from fxguard.rerun.drawn import UNLIKE, run_as_compiled
from fxguard.rerun.start import Start, written_since

__all__ = ["OTHER_NUMBERS", "measure_postponed", "measure_run"]

OTHER_NUMBERS = "a second run of its graph did not repeat its numbers"


def measure_postponed(batch: Batch) -> None:
    """Run the graphs of a batch again of which only the outputs were measured."""
    for run in batch.postponed:
        measure_run(run)


def measure_run(run: GraphRun) -> None:
    """Give a run its postponed numbers.

    If no second run repeats the first, ``run.not_again`` says so from then on. The run then has
    only the numbers of its inputs and outputs, and one step that represents all its operations.
    """
    postponed = run.postponed
    assert postponed is not None
    run.postponed = None
    run.not_again = Start(run).why_not()
    if run.not_again:  # perhaps nothing was copied
        lost = _entered(run.plan, (*run.plan.overwritten, *written_since(run)))
        postponed.overwritten = (*postponed.overwritten, *lost)
    other = OTHER_NUMBERS if run.draws is None else UNLIKE
    for second in () if run.not_again else _second_runs(run, postponed):
        try:
            numbers = second()
        except NotJudged as reason:
            other = str(reason)
            continue
        except theirs():  # it could not be captured again, or ran out of memory
            continue
        if _repeats(run.plan, numbers, postponed):
            run.statistics = numbers
            _forget_overwritten(run, postponed.overwritten)
            return
    run.not_again = run.not_again or other
    _stand_alone(run, postponed)


def _second_runs(run: GraphRun, postponed: Postponed) -> Iterator[Callable[[], Tensor]]:
    """Second runs with all checks, best first; each returns the numbers."""
    if run.draws is not None:  # Python would draw other numbers
        yield functools.partial(_as_compiled, run, run.draws)
        return
    for second in postponed.ways():
        yield functools.partial(_with_checks, run, second)


def _with_checks(run: GraphRun, checked: Callable[..., Any]) -> Tensor:
    with Start(run).begun() as given:
        *_, statistics = checked(*given)
    numbers: Tensor = statistics.cpu()
    expect_rows(numbers, len(run.plan.checks))
    return numbers


def _as_compiled(run: GraphRun, draws: Draws) -> Tensor:
    begin = Start(run, draws_itself=True).begun
    repeated = run_as_compiled(run, draws, begin, needed=True)
    draws.found = repeated.drawn
    return repeated.statistics


def _entered(plan: Plan, positions: Iterable[int]) -> Iterator[int]:
    """The values of arguments at some positions."""
    entered = dict((*plan.inputs, *plan.buffers))
    return (entered[position] for position in positions if position in entered)


def _repeats(plan: Plan, statistics: Tensor, postponed: Postponed) -> bool:
    """Whether the outputs of the graph have the same ranges in both runs."""
    leaving = eager.as_tensor(postponed.leaving).tolist()
    for value, (_, before) in zip(postponed.values, leaving, strict=True):
        slot = plan.values[value].slot
        if slot is not None and not same_magnitude(before, float(statistics[slot, 1])):
            return False
    return True


def _forget_overwritten(run: GraphRun, overwritten: Sequence[int]) -> None:
    """Leave out inputs that the second run could not see, because the first run had written them.

    If nothing bad was written over a bad input, it was bad before.
    """
    plan, highs = run.plan, run.statistics[:, 1].tolist()
    bad = {
        index
        for index, value in enumerate(plan.values)
        if value.slot is not None and not math.isfinite(highs[value.slot])
    }
    lost = {
        value
        for value in bad.intersection(overwritten)
        if any(value in s.inputs and not bad.isdisjoint({*s.inputs} - {value}) for s in plan.steps)
    }
    if lost:
        run.plan = replace(
            plan,
            values=tuple(
                replace(value, role=Role.MADE, slot=None, note="not kept") if i in lost else value
                for i, value in enumerate(plan.values)
            ),
        )


def _stand_alone(run: GraphRun, postponed: Postponed) -> None:
    """Use one step for the whole graph, with the numbers of its inputs and outputs."""
    assert run.args is not None
    plan, rows, name = run.plan, eager.as_tensor(postponed.leaving).tolist(), run.names[1]
    numbers = {
        value: traceable.decode(*row) for value, row in zip(postponed.values, rows, strict=True)
    }
    entered = [value for _, value in plan.inputs]
    for position, value in plan.inputs:
        if value not in postponed.overwritten:
            numbers.setdefault(value, range_of(run.args[position]))
    weights = [i for i, v in enumerate(plan.values) if v.role.is_standing]
    made = tuple(value for value in postponed.values if value not in entered)
    table = [
        RowPlan(f"{kind}[{index}]", value)
        for kind, listed in (("input", entered), ("output", made))
        for index, value in enumerate(listed)
    ]
    slots: dict[int, int] = {value: slot for slot, value in enumerate(numbers)}
    # Inputs written in place are assumed to be as bad as what it read.
    written = {value for _, value in plan.written if value is not None} - slots.keys()
    notes = dict.fromkeys(postponed.overwritten, "not kept") | dict.fromkeys(written, NOT_MEASURED)
    run.plan = replace(
        plan,
        values=tuple(
            replace(
                value,
                slot=slots.get(i),
                later=None,
                note=notes.get(i, value.note),
                is_assumed=i in written,
            )
            for i, value in enumerate(plan.values)
        ),
        steps=(Step(WHOLE_GRAPH, name, (*entered, *weights), (*made, *written)),),
        frames=(FramePlan(name, WHOLE_GRAPH, True, tuple(table), step=0, calls=run.calls),),
        checks=(),  # no check made a number, so no further run is compared
        later=(),
    )
    run.statistics = torch.tensor([_row(number) for number in numbers.values()]).view(-1, 2)


def _row(number: Range | str) -> tuple[float, float]:
    if isinstance(number, Range):
        return number.abs_min, number.abs_max
    return traceable.NO_DATA, traceable.NO_DATA
