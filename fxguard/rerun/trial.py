"""Runs a batch again with the failing operations in float32, to see whether that fixes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.graph import nodes
from fxguard.graph.wide_form import is_float
from fxguard.plan.plan import Step
from fxguard.rerun.consequences import check_of
from fxguard.rerun.differences import relative_error
from fxguard.rerun.other_values import Repaired
from fxguard.rerun.start import Start
from fxguard.rerun.wide_run import WideForm

__all__ = ["Trial", "in_float32"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial."""

    steps: tuple[Step, ...]  # the operations that ran in float32, the blamed one first
    error: float  # of the graph's output against float64, relative to the largest magnitude


def in_float32(batch: Batch, key: Key, harmless: Iterable[Key] = ()) -> Trial | None:
    """Run the graph of a batch with the operation that made a value in float32.

    Values that are too large for the model's dtype stay in float32, and each operation that fails
    later runs in float32 as well.

    Args:
        batch: the batch, still open.
        key: key of the value.
        harmless: keys of bad values that do no harm.

    Returns:
        None if the model has more than one graph, if its output is still not finite, or if float64
        gives nothing to compare with: it is not finite there either, or an operation from the
        blamed one on has no float64 form.
    """
    run = batch.run_of(key)
    alone = len(batch.runs) == 1 and not batch.uncaptured()
    if run is None or not alone:
        return None
    first = check_of(batch, key).place
    left = [check_of(batch, each).place for each in harmless]
    form = Repaired({first: None}, extends=True, harmless=left, dtype=torch.float32)
    low, other = Start(run).again(form)
    reference = WideForm()
    _, wide = Start(run).again(reference)
    by_place = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
    after = list(by_place)[list(by_place).index(first) :] if first in by_place else by_place
    if not reference.taken_over.keys().isdisjoint(after):
        return None
    leaves = zip(nodes.leaves(low), nodes.leaves(other), nodes.leaves(wide), strict=True)
    found = [(two.to(one.dtype), ref) for one, two, ref in leaves if is_float(one)]
    if not all(bool(ref.isfinite().all()) for _, ref in found):
        return None
    error = max((relative_error(low, ref) for low, ref in found), default=math.inf)
    if error == math.inf:
        return None
    places = [first, *(place for place in form.island if place != first)]
    steps = tuple(by_place[place] for place in places if place in by_place)
    return Trial(steps, error) if steps else None
