"""Compares what a graph returned as it ran, perhaps compiled, with its operations in eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fxguard.batch.kept_run import versions_of
from fxguard.comparison._graphs import Graphs
from fxguard.comparison._rounding import apart, error_of, is_same, unit_of
from fxguard.comparison._runs import KeptRun, ModelRun, unchanged
from fxguard.comparison.elements import Compared
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.rerun.start import Start
from fxguard.rerun.wide_run import WideForm

__all__ = ["as_it_ran"]

# How many times further from float64 than eager mode a graph may be. Eager mode counts as off by at
# least this many roundings.
TIMES, ROUNDINGS = 16, 16


def as_it_ran(model: ModelRun, side: str, graphs: Graphs) -> Iterator[Compared]:
    """What each graph of a model returned, where eager mode returns something else.

    Args:
        model: a model that has run.
        side: "A" or "B".
        graphs: notes what was not compared.
    """
    for number, kept in enumerate(model.runs):
        name = f"what graph {number} of {side} returned"
        try:
            yield from _compared(kept, name)
        except NotJudged as reason:
            graphs.not_compared[name] = str(reason)


def _compared(kept: KeptRun, name: str) -> Iterator[Compared]:
    run = kept.run
    if not unchanged(kept):
        raise NotJudged("its inputs were written after it had run")
    start = Start(run)
    with start.begun() as given:
        before = RandomState.now(run.args)
        low, wide = start.walk(given, WideForm())
        draws = not before.is_same(RandomState.now(run.args))
    now = versions_of(kept.outputs)
    for position, (output, eager, high) in enumerate(zip(kept.outputs, low, wide, strict=True)):
        if not is_float(output) or now[position] != kept.output_versions[position]:
            continue
        if is_same(output, eager):
            continue
        if draws:
            raise NotJudged("it draws random numbers, and compiled it may draw others")
        yield _judged(f"{name}, {position}", output.detach(), eager.detach(), high)


def _judged(title: str, output: Tensor, eager: Tensor, wide: Any) -> Compared:
    errors = error_of(eager, wide), error_of(output, wide)
    allowed = TIMES * max(errors[0], ROUNDINGS * unit_of(output))
    reason = ""
    if not errors[1] <= allowed:
        reason = (
            f"it is {errors[1]:.2g} from float64, and its operations in eager mode are "
            f"{errors[0]:.2g}: the compiler, or a kernel that it chose, makes something else"
        )
    return Compared(
        title,
        "compiled",
        dtypes=(dtype_of(eager), dtype_of(output)),
        total=apart(eager, output),
        reason=reason,
    )
