"""The ranges of a batch's operations, as series."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterator

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, UncapturedOperation
from fxguard.batch.plain_operations import Brief, LossBatch
from fxguard.graph.tables import UNINITIALISED
from fxguard.history._captured import Captured
from fxguard.history._open_step import OpenStep
from fxguard.history._places import MOST, detail_of
from fxguard.history._read_by_loss import ReadByLoss
from fxguard.plan.plan import Plan, Step
from fxguard.records import title_of
from fxguard.source.lines import Place

__all__ = ["Operations", "named_line"]

_Rows = list[tuple[int, int]]  # row of the statistics, and position of the series
_Operation = tuple[str, str]  # title and line
_Before = tuple[tuple[_Operation, int], ...]  # that have run, of those that a graph has, too


class Operations:
    """Adds batches to steps. A graph that is captured again continues its series.

    Args:
        step: the step that runs.

    Attributes:
        captured: the graphs that run.
        read: what losses read beside the outputs of models.
    """

    def __init__(self, step: OpenStep) -> None:
        self.step = step
        self.captured = Captured(step)
        self.read = ReadByLoss(step)
        self._is_of_loss = False
        self._plans: dict[int, Plan] = {}  # of graphs that ran, by identity
        # By plan, name of the module that it runs for, which run of both in the batch, and how many
        # operations of its lines and kinds have run before it.
        self._rows: dict[tuple[int, str, int, _Before], tuple[Plan, _Rows]] = {}
        self._keys: dict[tuple[int, str], tuple[Plan, Counter[_Operation]]] = {}

    def has_seen(self, run: GraphRun) -> bool:
        """Whether a graph is one of the model's."""
        return id(run.plan) in self._plans

    def add(self, batch: Batch, *, is_of_loss: bool = False) -> None:
        """Add the ranges of a batch whose numbers were read.

        Args:
            batch: of the model, or what a script has computed from its outputs.
            is_of_loss: whether it is the latter.
        """
        self._is_of_loss = is_of_loss
        if not is_of_loss:
            self.captured.begins()
        else:
            self.read.begins()
        runs: Counter[tuple[int, str]] = Counter()
        before: dict[tuple[int, str], _Before] = {}
        seen: Counter[_Operation] = Counter()
        earlier = list[Counter[_Operation]]()  # of graphs: mostly there is one, and nothing behind

        def count_earlier() -> None:
            while earlier:
                seen.update(earlier.pop())

        between = [] if batch.between is None else batch.between.tolist()
        for event in batch.brief_events if isinstance(batch, LossBatch) else batch.events:
            if isinstance(event, GraphRun):
                self.captured.add(event)
                if not is_of_loss:
                    self._plans[id(event.plan)] = event.plan
                if event.postponed is None:
                    which = id(event.plan), event.names[1]
                    runs[which] += 1
                    if which not in before:
                        count_earlier()
                        keys = self._keys_of(event)
                        before[which] = (
                            tuple((x, seen[x]) for x in keys if x in seen) if seen else ()
                        )
                        earlier.append(keys)
                    self._add_run(event, min(runs[which], MOST), before[which])
            elif isinstance(event, Brief) or (
                isinstance(event, UncapturedOperation) and event.counts
            ):
                if event.kind in UNINITIALISED:
                    continue
                is_outside = event.place == batch.caller and not is_of_loss  # as in a graph
                place = None if is_outside else event.place
                key = title_of(event.module, event.kind), named_line(place)
                count_earlier()
                seen[key] += 1
                if isinstance(batch, LossBatch):
                    self.read.add(batch, event, key[1], min(seen[key], MOST))
                for _, made in event.outputs:
                    if made.is_between_graphs and made.value < len(between):
                        dtype = batch.values[made.value].dtype
                        series = self._series(*key, min(seen[key], MOST), 1, dtype)
                        self.step.note_ranges([(made.value, series)], between)

    def _keys_of(self, run: GraphRun) -> Counter[_Operation]:
        """How many operations of each line and kind a graph has."""
        key = id(run.plan), run.names[1]
        plan, keys = self._keys.get(key, (None, Counter()))
        if plan is not run.plan:
            keys = Counter(_operation(run, step) for step in run.plan.steps if step.counts)
            self._keys[key] = run.plan, keys
        return keys

    def _add_run(self, run: GraphRun, number: int, before: _Before) -> None:
        key = id(run.plan), run.names[1], number, before
        plan, rows = self._rows.get(key, (None, []))
        if plan is not run.plan:
            rows = list(self._rows_of(run, number, before))
            self._rows[key] = run.plan, rows
        self.step.note_ranges(rows, run.statistics.tolist())

    def _rows_of(self, run: GraphRun, number: int, before: _Before) -> Iterator[tuple[int, int]]:
        seen = Counter(dict(before))
        for step in run.plan.steps:
            if step.counts and step.kind not in UNINITIALISED:
                key = _operation(run, step)
                seen[key] += 1
                values = [run.plan.values[value] for value in step.outputs]
                measured = [x for x in values if x.slot is not None]
                if measured:
                    dtype = measured[0].dtype
                    series = self._series(*key, min(seen[key], MOST), number, dtype)
                    yield from ((x.slot, series) for x in measured if x.slot is not None)

    def _series(self, title: str, source: str, which: int, run: int, dtype: str) -> int:
        """The series of an operation: which one of its line, and in which run of its graph."""
        return self.step.series(
            "operation",
            title,
            source,
            detail=detail_of(which, run),
            dtype=dtype,
            is_of_loss=self._is_of_loss,
        )


def _operation(run: GraphRun, step: Step) -> _Operation:
    title = title_of(run.running_name(step.module), step.kind)
    return title, "" if step.source is None else step.source.place


def named_line(place: Place | None) -> str:
    """``train.py:31``; "" for none."""
    return "" if place is None else f"{os.path.basename(place[0])}:{place[1]}"
