"""The samples of a batch: which inputs hold them, and how to replace one by another."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.wide_form import is_float
from fxguard.measure.at_hand import own_arithmetic
from fxguard.records import Range, Role
from fxguard.rerun.consequences import Replay
from fxguard.rerun.other_values import AsTheModel
from fxguard.rerun.other_ways import Other

__all__ = ["Samples", "bad_rows", "returned_on_others", "samples_of"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch: dimension 0 of its inputs."""

    count: int
    inputs: tuple[Key, ...]  # the inputs that hold them

    def healthy(self, bad: Collection[int]) -> int | None:
        """The first sample that is not bad; None if all are."""
        return next((i for i in range(self.count) if i not in bad), None)

    def index(self, bad: Collection[int], healthy: int) -> list[int]:
        """The sample in each place after a healthy one has replaced each bad one.

        Example:
            >>> Samples(3, ()).index({1}, healthy=0)
            [0, 0, 2]
        """
        return [healthy if i in bad else i for i in range(self.count)]

    def given(self, index: Sequence[int]) -> dict[Key, Other]:
        """The replacements of the inputs for such an index."""

        def other(given: Tensor) -> Tensor:
            return given.index_select(0, torch.tensor(index, device=given.device))

        return dict.fromkeys(self.inputs, other)


def samples_of(batch: Batch, flow: DataFlow, upto: int | None = None) -> Samples | None:
    """The samples that the graphs of a batch were given.

    Args:
        batch: the batch, still open.
        flow: the data flow of the batch.
        upto: index of the last event that counts; None for all of them.

    Returns:
        None if the inputs disagree on the number, if there are fewer than two, or if an operation
        between graphs reads them, which cannot run again.
    """
    found: dict[Key, Tensor] = {}
    events = batch.events if upto is None else batch.events[: upto + 1]
    for index, event in enumerate(events):
        if not isinstance(event, GraphRun) or event.args is None:
            continue
        for position, value in event.plan.inputs:
            given = event.args[position]
            key = event.inputs.get(value, Key(index, value))
            is_given = flow.values[flow.place[key]].role is Role.INPUT
            if is_given and isinstance(given, Tensor) and given.dim() > 0:
                found[key] = given
                if value in event.derived:
                    return None
    read = {key for e in events if isinstance(e, UncapturedOperation) for _, key in e.inputs}
    views = {key for e in events if isinstance(e, GraphRun) for key in e.derived.values()}
    sizes = {given.shape[0] for given in found.values()} - {1}  # size 1: shared by all samples
    is_batch = len(sizes) == 1 and any(given.dim() > 1 for given in found.values())
    if not is_batch or (read | views) & found.keys():
        return None
    count = sizes.pop()
    return Samples(count, tuple(key for key, given in found.items() if given.shape[0] == count))


def bad_rows(value: Tensor) -> tuple[int, ...]:
    """The indices of dimension 0 with non-finite elements.

    Empty for a nested or sparse tensor, whose samples have no common form.
    """
    if value.is_nested or value.layout is not torch.strided:
        return ()
    with own_arithmetic():
        bad = (~value.isfinite()).reshape(value.shape[0], -1).any(1)
        return tuple(map(int, bad.nonzero().flatten()))


def returned_on_others(batch: Batch, flow: DataFlow, given: Mapping[Key, Other]) -> float | None:
    """The largest magnitude that the model returns for other inputs.

    Args:
        batch: the batch, still open.
        flow: the data flow of the batch.
        given: replacements for some inputs.

    Returns:
        None if no second run is possible, or if it would not reveal a bad value; inf or NaN if
        something is still bad.
    """
    replay = Replay(batch, flow, lambda event: AsTheModel(), frozenset(), given)
    with where_theirs_may_raise():  # the model may refuse the other sample
        replay.run()
        bad = [place for place in flow.reached if _is_bad(flow.ranges[place])]
        changed = {flow.place[key]: other for key, (_, other) in replay.changed.items()}
        if not bad or not changed.keys() >= set(bad):
            return None
        others = [changed[place] for place in flow.reached if place in changed]
        with own_arithmetic():
            largest = [float(x.abs().max()) for x in others if is_float(x) and x.numel()]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=None)
    return None


def _is_bad(found: Range | str) -> bool:
    return isinstance(found, Range) and bool(found.severity)
