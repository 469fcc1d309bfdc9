"""Assembles the data flow of a finished batch: graphs and operations between them, numbered."""

from __future__ import annotations

from collections.abc import Iterator

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, LookAgain, ModuleReturn
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.measure.traceable import decode
from fxguard.plan.plan import merge_root, merge_single_operations
from fxguard.records import Role, RowRole
from fxguard.source.lines import source_at

__all__ = ["assemble", "operations_of", "reached_by_failure"]


def assemble(batch: Batch, look_again: LookAgain | None = None) -> DataFlow:
    """Number the values of all events of a batch consecutively.

    Args:
        batch: a batch whose numbers have been read.
        look_again: gives the ranges of values that only a second run can see, by index in the plan.
            It is called for each run with such values.
    """
    flow = DataFlow(batch.number, labels=batch.labels)
    if batch.between is not None:
        pairs = batch.between.tolist()
        for index, value in enumerate(batch.values):
            found = value.note or decode(*pairs[index])
            flow.add_value(Key(BETWEEN_GRAPHS, index), value, found)
    parts = [*batch.parts]
    for index, event in enumerate(batch.events):
        while parts and parts[0][0] <= index:
            flow.parts.append((len(flow.frames), parts.pop(0)[1]))
        event.add_to(flow, index, look_again)
    flow.parts += [(len(flow.frames), part) for _, part in parts]
    if len(batch.events) > len(batch.runs):
        flow.frames = merge_root(merge_single_operations(flow.frames))
    if batch.caller is not None:
        flow.add_caller(source_at(batch.caller))
    flow.drop_frames_without_numbers()
    for frame in flow.frames:
        if not frame.is_op and not frame.name:
            rows = [row.value for row in frame.rows if RowRole.of(row.label) is RowRole.OUTPUT]
            flow.results += [value for value in rows if value is not None]
    left = dict(_left_in_memory(flow, batch))
    flow.reached = [*flow.results, *left]
    flow.written = {now: before for now, before in left.items() if now not in flow.results}
    if batch.held_as:
        flow.name_model(batch.held_as)
    if batch.ends is not None:  # a loss, which no model returned
        flow.results, flow.reached = [], [flow.place[key] for key in batch.ends]
    elif not any(isinstance(event, ModuleReturn) and not event.name for event in batch.events):
        flow.reached += _returned_by_graphs(flow, batch)
    return flow


def _returned_by_graphs(flow: DataFlow, batch: Batch) -> Iterator[int]:
    """What graphs returned: the outputs of a model whose root module is not seen."""
    for index, event in enumerate(batch.events):
        if isinstance(event, GraphRun):
            yield from (flow.place[Key(index, i)] for i in event.plan.outputs if i is not None)


def _left_in_memory(flow: DataFlow, batch: Batch) -> Iterator[tuple[int, int]]:
    """What graphs wrote to memory that outlives the batch, and what was there: inputs, buffers."""
    for index, event in enumerate(batch.events):
        for before, now in event.writes(index) if isinstance(event, GraphRun) else ():
            if now is not None and flow.values[flow.place[before]].role is not Role.MADE:
                yield flow.place[now], flow.place[before]


def operations_of(batch: Batch) -> set[tuple[str, str]]:
    """Module and kind of each operation that a batch may have run."""
    return {operation for event in batch.events for operation in event.operations()}


def reached_by_failure(flow: DataFlow, batch: Batch) -> list[int]:
    """Values that may be the reason why the forward raised.

    These are values that graphs returned to Python, that the raising operation had read, or that
    were made between graphs and not read by any operation.
    """
    read = {value for step in flow.steps for value in step.inputs}
    keys = [
        key for index, event in enumerate(batch.events) for key in event.suspects(flow, index, read)
    ]
    return [flow.place[key] for key in keys if key in flow.place]
