"""Gradients that are 0 throughout because float16 cannot hold them, and how to lift them.

The backward runs again with its gradients multiplied by a power of two, like a loss scale. A
gradient that is 0 without the factor but not with it was lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import GRADIENT_OF, Fix, Origin
from fxguard.forgiving import where_theirs_may_raise
from fxguard.formats import FORMATS
from fxguard.records import Frame, Role, Severity
from fxguard.rerun.backward_flow import BackwardFlow
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import origins_of

__all__ = ["origin_of_lost"]

HALF = "float16"  # bfloat16 has the range of float32

# Factors for gradients, tried in turn while some overflow, or stay 0 next to others that do not.
# For most models all of them are rightly 0, which one second run shows.
LIFTS = (2.0**15, 2.0**7, 2.0**24)

WANTED = FORMATS[HALF].smallest * 2.0**7  # for the largest one: it has digits, and others are not 0

RETURNED = "what the model returned"


@dataclass(frozen=True, slots=True)
class Lost:
    """A gradient that was lost."""

    backward: BackwardFlow
    value: int  # in its data flow
    largest: float  # the magnitude that it would have
    step: int | None  # the operation whose backward lost it


def origin_of_lost(kept: Sequence[KeptRun], leaves: Sequence[str]) -> Origin | None:
    """The origin for gradients that float16 has lost; None if it lost none.

    Args:
        kept: the graph runs that gradients reached, in the order of their forward.
        leaves: leaves whose gradients were 0 throughout: "weight fc.weight".
    """
    halves = [run for run in kept if any(v.dtype == HALF for v in run.event.plan.values)]
    of_leaves = [run for run in halves if not _weights_of(run).isdisjoint(leaves)]
    reached = [run for run in of_leaves if any(bool(x.any()) for x in run.incoming.values())]
    found: dict[str, Lost] = {}
    for run in reached:
        found |= _lost_in(run, leaves)
    if not found and len(reached) < len(of_leaves):  # what came in was 0: lost before
        for run in reversed([run for run in halves if run not in of_leaves]):
            found |= _lost_in(run, ())
    names = [name for name in leaves if name in found] or list(found)
    if not names:
        return None
    largest = max(found[name].largest for name in names)
    first = found[names[0]]
    frame = Frame("", "gradient", True, (), phase="backward")
    if first.step is not None:
        frame = first.backward.frame_of(first.step)
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return Origin(
        frame=frame,
        problem="underflow",
        what=GRADIENT_OF + names[0].removeprefix("weight ") + more,
        row="grad of output",
        cause="underflow",
        dtype=HALF,
        operands=f"the largest would be {largest:.1g}",
        fixes=(_fix(kept, [found[name] for name in names]),),
    )


def _weights_of(run: KeptRun) -> set[str]:
    values = [value for value in run.event.plan.values if value.role is Role.WEIGHT]
    return {f"weight {run.event.running_name(value.name)}" for value in values}


def _fix(kept: Sequence[KeptRun], lost: Sequence[Lost]) -> Fix:
    """The loss scale that lifts all these gradients, if there is one."""
    exponent = math.ceil(math.log2(WANTED / min(each.largest for each in lost)))
    for run in kept:
        with where_theirs_may_raise():  # it does not run again: nothing is known
            lifted = BackwardFlow(run, gradients_of(run, 2.0**-exponent))
            overflows = any(found.severity for found in lifted.gradients.totals.values())
            values = [each.value for each in lost if each.backward.kept is run]
            if overflows or not all(_is_lifted(lifted, value) for value in values):
                return Fix("advice", "bfloat16 or float32 holds them")
    return Fix("tried", f"a loss scale of 2**{exponent} lifts them")


def _lost_in(run: KeptRun, leaves: Collection[str]) -> dict[str, Lost]:
    """The losses of one graph: of given leaves or, without any, of what other graphs made."""
    found: dict[str, Lost] = {}
    with where_theirs_may_raise():  # it does not run again: nothing is known
        plain: BackwardFlow | None = None
        waiting: dict[int, str] | None = None
        for lift in LIFTS:
            lifted = BackwardFlow(run, gradients_of(run, 1 / lift))
            if waiting is None:
                waiting = _wanted(lifted, leaves)
            hits = [value for value in waiting if _is_lifted(lifted, value)]
            if hits and plain is None:
                plain = BackwardFlow(run, gradients_of(run))
            for value in hits:
                assert plain is not None
                name = waiting.pop(value)
                if _largest(plain, value) == 0:
                    step = _step_that_lost(plain, lifted, value)
                    found[name] = Lost(plain, value, _largest(lifted, value) / lift, step)
            if not found and all(_largest(lifted, value) == 0 for value in waiting):
                break
    return found


def _wanted(backward: BackwardFlow, leaves: Collection[str]) -> dict[int, str]:
    """Gradients of a graph to examine, with their names."""
    of = backward.flow.values
    names = {value: f"weight {of[value].name}" for value in backward.flow.reached if of[value].name}
    if leaves:
        return {value: name for value, name in names.items() if name in leaves}
    return {value: RETURNED for value in backward.flow.reached if value not in names}


def _is_lifted(lifted: BackwardFlow, value: int) -> bool:
    return 0 < _largest(lifted, value) < math.inf


def _largest(backward: BackwardFlow, value: int) -> float:
    """The magnitude of a gradient; NaN if none came."""
    found = backward.range_of(value)
    return math.nan if found is None else found.abs_max


def _step_that_lost(plain: BackwardFlow, lifted: BackwardFlow, value: int) -> int | None:
    """The operation whose backward turned nonzero gradients into 0 on the way to a value."""

    def lost(value: int) -> Severity:
        is_lost = _largest(plain, value) == 0 < _largest(lifted, value)
        return Severity.INF if is_lost else Severity.FINITE

    origins = origins_of(plain, severity=lost, reached=[value])
    steps = (blame.step for blame in origins.origins if blame.step is not None)
    return next((step for step in steps if plain.operation_of(step) is not None), None)
