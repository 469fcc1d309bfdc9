"""Runs a captured graph again, node by node in eager mode, to take fingerprints of its values.

The first run only kept reductions of the values, and a compiler may never have made the values. The
second run starts like the first, and its ranges are compared with those of the first run. If one of
them differs, or no second run is possible, the graph has no fingerprints, and a note says why: a
fingerprint never belongs to another run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, UncapturedOperation
from fxguard.batch.fingerprints import FingerprintNotes
from fxguard.batch.keys import Key
from fxguard.forgiving import theirs
from fxguard.formats import format_of
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged
from fxguard.measure import eager
from fxguard.measure.fingerprints import fingerprint_of
from fxguard.records import Fingerprint, Role
from fxguard.rerun.at_checks import AtChecks
from fxguard.rerun.differences import TOLERANCE
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk
from fxguard.rerun.whole_graph import OTHER_NUMBERS

__all__ = ["fingerprints_of", "take_fingerprints"]

WRITTEN = "its graph wrote it"
WRITTEN_SINCE = "an input of its graph may have been written since"
STOPPED = "a second run of its graph was stopped by an error"
RANDOM = "its graph draws random numbers under a compiler"
MANY_TIMES = "made many times, in a loop"
NOT_MADE = "a second run did not come to it"

# How many roundings of the largest magnitude may lie between the numbers of two eager runs: kernels
# without gradients add in another order.
ROUNDINGS = 64


class _Other(Exception):  # noqa: N818 - a signal, not an error
    """The second run did not repeat the first one."""


def take_fingerprints(batch: Batch) -> None:
    """Note the fingerprints of all values that the graphs of a batch measured.

    Args:
        batch: a batch that was read and is still open. If it has noted no fingerprints between
            graphs, it gets a place for them.
    """
    notes = batch.watcher(FingerprintNotes)
    if notes is None:
        batch.watchers.append(notes := FingerprintNotes())
    for index, event in enumerate(batch.events):
        if isinstance(event, GraphRun):
            later = batch.events[index + 1 :]
            is_last = not any(isinstance(e, (GraphRun, UncapturedOperation)) for e in later)
            found = fingerprints_of(event, is_last=is_last)
            notes.of |= {Key(index, value): each for value, each in found.items()}


def fingerprints_of(run: GraphRun, *, is_last: bool = True) -> dict[int, Fingerprint]:
    """The fingerprint of each value of a graph with a range.

    Args:
        run: the graph run, still open, with its numbers on the host.
        is_last: whether no other graph and no operation has run since.

    Returns:
        Value of the plan to its fingerprint, or to one with a note that says why there is none.
    """
    measured = {v.slot: i for i, v in enumerate(run.plan.values) if v.slot is not None}
    why = _why_not(run, is_last)
    found: dict[int, Fingerprint] = {}
    if not why:
        try:
            _second_run(run, measured, found)
        except NotJudged as reason:  # it has repeated the first run until then
            why = str(reason)
            if run.is_compiled and run.random_state is not None:
                found.clear()
        except _Other as other:
            why = str(other)
            found.clear()
        except theirs():  # no memory, or a missing kernel
            why = STOPPED
            found.clear()
    missing = Fingerprint(note=why or NOT_MADE)
    overwritten = {
        value: Fingerprint(note=WRITTEN)
        for position, value in run.plan.inputs
        if position in _written_by(run) and not why
    }
    return dict.fromkeys(measured.values(), missing) | found | overwritten


def _written_by(run: GraphRun) -> set[int]:
    """Positions of inputs that the graph wrote and that were not copied."""
    return {position for position, _ in run.plan.written} - set(run.plan.overwritten)


def _why_not(run: GraphRun, is_last: bool) -> str:
    """Why no second run may begin: ranges do not reveal every write to an input."""
    reason = Start(run, to_the_end=False).why_not()
    if reason or is_last or run.args is None or run.versions is None:
        return reason
    own = _written_by(run)
    for position, (argument, version) in enumerate(zip(run.args, run.versions, strict=True)):
        if version is None and isinstance(argument, Tensor) and position not in own:
            return WRITTEN_SINCE  # in inference mode versions are not counted
    return ""


def _second_run(run: GraphRun, measured: dict[int, int], found: dict[int, Fingerprint]) -> None:
    first: Sequence[Any] = run.statistics.tolist()
    allowed = _allowed(run)

    def visit(walk: Walk, slot: int, tensor: Any) -> None:
        index = measured[slot]
        if walk.repeats:
            found[index] = Fingerprint(note=MANY_TIMES)
            return
        value = run.plan.values[index]
        low, high = map(float, eager.abs_min_max(tensor))
        # Inputs are unchanged: a cache that the graph wrote was copied before.
        apart = allowed if value.can_be_bad else 0.0
        if value.role is Role.MADE and not _repeats((low, high), first[slot], apart):
            raise _Other(OTHER_NUMBERS)
        taken = fingerprint_of(tensor)
        found[index] = replace(taken, of_eager_run=run.is_compiled and not taken.note)

    start = Start(run, to_the_end=False, draws_itself=True)
    with start.begun() as given:
        start.walk(given, AtChecks(enumerate(run.plan.checks), visit))
        # A compiler may have drawn from its own generator, which ranges cannot reveal.
        if run.is_compiled and _has_drawn(run):
            raise _Other(RANDOM)


def _has_drawn(run: GraphRun) -> bool:
    """Whether the second run, which has just ended, drew random numbers."""
    begun = run.random_state
    return begun is not None and not RandomState.now(run.args).is_same(begun)


def _allowed(run: GraphRun) -> float:
    """How far apart the ranges of two runs may be, relative to the largest magnitude.

    A compiler keeps more digits between fused operations. The coarsest dtype counts for all values,
    because results computed from rounded numbers are as far apart as these.
    """
    if run.is_compiled:
        return TOLERANCE
    formats = [format_of(value.dtype) for value in run.plan.values]
    coarsest = max((known.eps for known in formats if known is not None), default=0.0)
    return min(TOLERANCE, ROUNDINGS * coarsest)


def _repeats(now: tuple[float, float], before: Sequence[float], allowed: float) -> bool:
    """Whether two runs made tensors with the same range; each has abs min and abs max."""
    (low, high), (low_before, high_before) = now, before
    if not math.isfinite(high) or not math.isfinite(high_before):
        return str(high) == str(high_before)
    apart = max(abs(high - high_before), abs(low - low_before))
    return apart <= allowed * abs(max(high, high_before)) + 1e-30  # a mark is negative
