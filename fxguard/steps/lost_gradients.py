"""Gradients that are 0 throughout because float16 cannot hold them, and how to lift them.

The backward runs again with its gradients multiplied by a power of two, like a loss scale. A
gradient that is 0 without the factor but not with it was lost.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import GRADIENT_OF, Fix, Origin
from fxguard.formats import FORMATS
from fxguard.records import Frame, Role
from fxguard.rerun.edges import BackwardOf, Gradients
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward_origins import Backward

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

    value: int  # its number in `Gradients`
    largest: float  # the magnitude that it would have
    operation: BackwardOf | None  # the operation whose backward lost it
    backward: Backward


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
    if first.operation is not None:
        frame = first.backward.frame_of(first.operation)
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
    values = run.event.plan.values
    return {f"weight {value.name}" for value in values if value.role is Role.WEIGHT}


def _fix(kept: Sequence[KeptRun], lost: Sequence[Lost]) -> Fix:
    """The loss scale that lifts all these gradients, if there is one."""
    exponent = math.ceil(math.log2(WANTED / min(each.largest for each in lost)))
    for run in kept:
        with contextlib.suppress(Exception):  # it does not run again: nothing is known
            lifted = gradients_of(run, 2.0**-exponent)
            overflows = any(found.severity for found in lifted.totals.values())
            values = [each.value for each in lost if each.backward.kept is run]
            if overflows or not all(_is_lifted(lifted, value) for value in values):
                return Fix("advice", "bfloat16 or float32 holds them")
    return Fix("tried", f"a loss scale of 2**{exponent} lifts them")


def _lost_in(run: KeptRun, leaves: Collection[str]) -> dict[str, Lost]:
    """The losses of one graph: of given leaves or, without any, of what other graphs made."""
    found: dict[str, Lost] = {}
    with contextlib.suppress(Exception):  # it does not run again: nothing is known
        backward: Backward | None = None
        waiting: dict[int, str] | None = None
        for lift in LIFTS:
            lifted = gradients_of(run, 1 / lift)
            if waiting is None:
                waiting = _wanted(lifted, leaves)
            hits = [value for value in waiting if _is_lifted(lifted, value)]
            if hits and backward is None:
                backward = Backward(run, gradients_of(run))
            for value in hits:
                assert backward is not None
                name, plain = waiting.pop(value), backward.gradients
                if _largest(plain, value) == 0:
                    maker = _operation_that_lost(plain, lifted, value)
                    found[name] = Lost(value, _largest(lifted, value) / lift, maker, backward)
            if not found and all(_largest(lifted, value) == 0 for value in waiting):
                break
    return found


def _wanted(gradients: Gradients, leaves: Collection[str]) -> dict[int, str]:
    """Values of a graph to examine, with their names."""
    names = {value: f"weight {name}" for value, name in gradients.weights.items()}
    if leaves:
        return {value: name for value, name in names.items() if name in leaves}
    return {value: RETURNED for value in gradients.arguments.values() if value not in names}


def _is_lifted(lifted: Gradients, value: int) -> bool:
    return 0 < _largest(lifted, value) < math.inf


def _largest(gradients: Gradients, value: int) -> float:
    """The magnitude of a gradient; NaN if none came."""
    found = gradients.totals.get(value)
    return math.nan if found is None else found.abs_max


def _operation_that_lost(plain: Gradients, lifted: Gradients, value: int) -> BackwardOf | None:
    """The operation whose backward turned nonzero gradients into 0 on the way to a value."""
    seen: set[int] = set()
    while value not in seen:
        seen.add(value)
        readers = (
            operation
            for operation in plain.operations
            if any(edge.value == value and edge.range is not None for edge in operation.edges)
        )
        for operation in readers:
            lost = [x for x in operation.made if _largest(plain, x) == 0 < _largest(lifted, x)]
            if not lost:
                return operation
            value = lost[0]
            break
    return None
