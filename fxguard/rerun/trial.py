"""A batch once more, with the operations that failed in float32: whether that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.graph import nodes
from fxguard.graph.wide_form import is_float
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Step
from fxguard.rerun.consequences import check_of
from fxguard.rerun.lockstep import Lockstep
from fxguard.rerun.other_values import Repaired
from fxguard.rerun.same_start import as_before, copies_of
from fxguard.rerun.wide_run import WideForm

__all__ = ["Trial", "in_float32"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it."""

    steps: tuple[Step, ...]  # the operations that ran in float32, the blamed one first
    error: float  # of what the graph returned, against float64; relative to its largest magnitude


def in_float32(batch: Batch, key: Key, harmless: Iterable[Key] = ()) -> Trial | None:
    """Run the graph of a batch with the operation that made a value in float32.

    What stays too large for the model's dtype goes on in float32, and so does each operation that
    fails after it.

    Args:
        batch: still open.
        key: of the value.
        harmless: of bad values that do no harm.

    Returns:
        None where the model has more than one graph, or where what it returns is not finite then.
    """
    run = batch.run_of(key)
    alone = len(batch.runs) == 1 and not batch.uncaptured()
    if run is None or not alone or run.args is None or not run.repeated:
        return None
    check = check_of(batch, key)
    graph = without_marks(run.graph_module)
    checks = [check_of(batch, each) for each in harmless if each.event == key.event]
    form = Repaired(
        {(check.inside, check.after): None},
        extends=True,
        harmless=[(check.inside, check.after) for check in checks],
        dtype=torch.float32,
    )
    with as_before(run):
        low, other = Lockstep(graph, form).run_both(copies_of(run))
    with as_before(run):
        _, wide = Lockstep(graph, WideForm()).run_both(copies_of(run))
    error = 0.0
    leaves = zip(nodes.leaves(low), nodes.leaves(other), nodes.leaves(wide), strict=True)
    for one, two, reference in leaves:
        if not is_float(one):
            continue
        found = _error(two.to(one.dtype), reference)
        if found is None:
            return None
        error = max(error, found)
    by_place = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
    first = (check.inside, check.after)
    places = [first, *(place for place in form.island if place != first)]
    steps = tuple(by_place[place] for place in places if place in by_place)
    return Trial(steps, error) if steps else None


def _error(made: Any, reference: Any) -> float | None:
    """None where something is infinite that is not in the reference."""
    finite = reference.isfinite()
    wide = made.to(reference.dtype)[finite]
    if not bool(wide.isfinite().all()):
        return None
    if not wide.numel():
        return 0.0
    gap = float((wide - reference[finite]).abs().max())
    return gap / float(reference[finite].abs().max()) if gap else 0.0
