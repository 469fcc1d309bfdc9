"""A finished batch to one trace: all graphs and gaps in one numbering, with numbers.

Nothing here runs while all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.batch.batch import BETWEEN_GRAPHS, Batch, GapOperation, GraphRun, Key, ModuleReturn
from fxguard.graph import nodes
from fxguard.graph.source_lines import source_at
from fxguard.measure import traceable as stats
from fxguard.measure.func_levels import unwrapped
from fxguard.measure.traceable import NOTES
from fxguard.plan.plan import (
    LATER,
    FramePlan,
    Plan,
    RowPlan,
    Step,
    Value,
    merge_root,
    merge_single_operations,
)
from fxguard.ranks.fsdp import has_memory
from fxguard.records import Frame, Range, Role, Row, RowRole, Source

__all__ = ["DataFlow", "assemble", "frames_of", "render"]

NOT_RUN = NOTES[stats.NOT_RUN]


@dataclass(slots=True)
class DataFlow:
    """One batch: operations, values and frames, numbered through."""

    values: list[Value]
    stats: list[Range | str]  # of each value; a string says why there is no number
    steps: list[Step]
    frames: list[FramePlan]
    reached: list[int]  # values that are an output of a module or of the model
    keys: list[Key]  # where each value comes from
    at: dict[Key, int]  # the other way round
    results: list[int]  # values that are an output of the model


def frames_of(plan: Plan, statistics: Tensor, model: Module | None = None) -> list[Frame]:
    """The frames of one run of a graph that :func:`fxguard.insert_checks` made.

    Args:
        plan: what ``insert_checks`` returned.
        statistics: the second output of the graph, shape ``[len(plan.checks), 2]``.
        model: the model that the graph was made of, for the rows of weights and buffers.
    """
    found = read_statistics(plan, statistics)
    return [render(frame, plan.values, found, model) for frame in plan.frames]


def read_statistics(plan: Plan, statistics: Tensor) -> list[Range | str]:
    """The range of each value of a plan."""
    numbers = statistics.tolist()
    return [
        value.note or "not measured" if value.slot is None else stats.decode(*numbers[value.slot])
        for value in plan.values
    ]


def render(
    frame: FramePlan,
    values: Sequence[Value],
    found: Sequence[Range | str],
    model: Module | None,
    unlike: Callable[[Tensor], str] | None = None,
) -> Frame:
    """One frame with its numbers.

    Args:
        frame: the frame.
        values: what its rows refer to.
        found: the range of each value.
        model: for the rows of weights and buffers, which no graph measures.
        unlike: says of one of those why it may no longer be what it was in the batch; "" where it
            still is. They all are where it is not given.
    """

    def standing_row(label: str, tensor: Tensor) -> Row:
        note = unlike(tensor) if unlike is not None else ""
        return row_with(label, note or range_of(tensor), dtype_of(tensor))

    rows = []
    if not frame.is_op and isinstance(module := _at(model, frame.name), Module):
        rows += own_rows(frame.name, module, values, found, standing_row)
    for row in frame.rows:
        if row.value is None:
            rows.append(Row(row.label, note=row.note))
            continue
        number, value = found[row.value], values[row.value]
        standing = _at(model, value.name) if value.role.is_standing else None
        if standing is not None and not isinstance(number, Range):
            rows.append(standing_row(row.label, standing))
        else:
            rows.append(row_with(row.label, number, value.dtype))
    return Frame(frame.name, frame.kind, frame.is_op, tuple(rows), frame.source)


def own_rows(
    name: str,
    module: Module,
    values: Sequence[Value],
    found: Sequence[Range | str],
    standing_row: Callable[[str, Tensor], Row],
) -> list[Row]:
    """The rows of a module's own parameters: what the graph measured, where FSDP gathered them."""
    own = dict(module.named_parameters(recurse=False))
    measured = {}
    if any(map(stats.inside, own.values())):
        measured = {
            value.name: number
            for value, number in zip(values, found, strict=True)
            if value.role is Role.WEIGHT and isinstance(number, Range)
        }
    rows = []
    for label, parameter in own.items():
        number = measured.get(f"{name}.{label}".lstrip("."))
        if number is None:
            rows.append(standing_row(label, parameter))
        else:
            rows.append(row_with(label, number, dtype_of(parameter)))
    return rows


def _at(model: Module | None, name: str) -> Any:
    """The submodule, parameter or buffer of a qualified name, None where there is none."""
    found: Any = model
    for part in filter(None, name.split(".")):
        found = getattr(found, part, None)
    return found


def row_of(label: str, tensor: Tensor) -> Row:
    """A row for a tensor that is at hand."""
    return row_with(label, range_of(tensor), dtype_of(tensor))


def row_with(label: str, number: Range | str, dtype: str) -> Row:
    """A row with a range, or the reason why there is none."""
    if isinstance(number, str):
        return Row(label, note=number, dtype=dtype)
    return Row(label, number.abs_min, number.abs_max, dtype=dtype)


def dtype_of(tensor: Tensor) -> str:
    """``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def range_of(tensor: Tensor) -> Range | str:
    """The range of a tensor that is at hand."""
    tensor = unwrapped(tensor)
    if tensor.is_meta:
        return "meta"
    if not has_memory(tensor):
        return stats.NOTES[stats.NO_DATA]
    try:
        low, high = stats.abs_min_max(tensor)
        return stats.decode(float(low), float(high))
    except (NotImplementedError, RuntimeError):  # a subclass that knows few operations
        return stats.NOTES[stats.NO_DATA]


def assemble(
    batch: Batch, look_again: Callable[[GraphRun], Mapping[int, Range | str]] | None = None
) -> DataFlow:
    """Number the values of all events of a batch through.

    Args:
        batch: a batch whose numbers were read.
        look_again: gives the numbers of values that only a second run can see, by index in the
            plan. Asked for each run that has such values.
    """
    flow = DataFlow([], [], [], [], [], [], {}, [])
    at = flow.at
    collected = iter(batch.statistics())

    def add(key: Key, value: Value, number: Range | str) -> None:
        at[key] = len(flow.values)
        flow.values.append(value)
        flow.stats.append(number)
        flow.keys.append(key)

    runs = [(i, event) for i, event in enumerate(batch.events) if isinstance(event, GraphRun)]
    numbers = {i: read_statistics(run.plan, next(collected)) for i, run in runs}
    if look_again is not None:
        for i, run in runs:
            if run.plan.later:
                for late, number in look_again(run).items():
                    numbers[i][late] = number
    if batch.between is not None:
        rows = batch.between.tolist()
        for index, value in enumerate(batch.values):
            number = value.note or stats.decode(*rows[index])
            add((BETWEEN_GRAPHS, index), value, number)
    for index, event in enumerate(batch.events):
        if isinstance(event, GraphRun):
            for local, (value, number) in enumerate(
                zip(event.plan.values, numbers[index], strict=True)
            ):
                if local in event.inputs:
                    at[(index, local)] = at[event.inputs[local]]
                    continue
                if local in event.derived:
                    value = replace(value, role=Role.MADE)
                add((index, local), _renamed_value(value, event.names), number)
                if local in event.derived:
                    origin, copy = at[event.derived[local]], at[(index, local)]
                    link = Step("view", event.names[1], (origin,), (copy,), counts=False)
                    flow.steps.append(link)
            _add_run(flow, event, lambda local, index=index: at[(index, local)])  # type: ignore[misc]
        elif isinstance(event, GapOperation):
            _add_operation(flow, event, at, batch)
        else:
            _add_module(flow, event, at)
    if len(batch.events) > len(runs):
        flow.frames = merge_root(merge_single_operations(flow.frames))
    if batch.caller is not None:
        _add_caller(flow, source_at(batch.caller))
    flow.frames = [frame for frame in flow.frames if _ran(frame, flow)]
    for frame in flow.frames:
        if not frame.is_op:
            found = [r.value for r in frame.rows if RowRole.of(r.label) is RowRole.OUTPUT]
            values = [value for value in found if value is not None]
            flow.reached += values
            flow.results += [] if frame.name else values
    return flow


def _add_caller(flow: DataFlow, caller: Source) -> None:
    """Give operations that torch alone has lines of the line that called the model."""
    flow.steps = [s if s.source else replace(s, source=caller) for s in flow.steps]
    flow.frames = [
        frame if frame.source or frame.step is None else replace(frame, source=caller)
        for frame in flow.frames
    ]


def operations_of(batch: Batch) -> set[tuple[str, str]]:
    """Module and kind of each operation that a batch may have run."""
    found = set()
    for event in batch.events:
        if isinstance(event, GraphRun):
            found |= {(_renamed(s.module, event.names), s.kind) for s in event.plan.steps}
        elif isinstance(event, GapOperation):
            found.add((event.module, event.kind))
    return found


def show_step(flow: DataFlow, index: int) -> None:
    """Give an operation a frame that has none of its own, such as one that joins parts."""
    if any(frame.step == index for frame in flow.frames):
        return
    step = flow.steps[index]
    if len(step.outputs) == 1:
        rows = [RowPlan("output", step.outputs[0])]
    else:
        rows = [RowPlan(f"output[{i}]", value) for i, value in enumerate(step.outputs)]
    rows[:0] = [RowPlan(f"input[{i}]", value) for i, value in enumerate(step.inputs)]
    made = FramePlan(step.module, step.kind, True, tuple(rows), step.source, index)

    def is_later(frame: FramePlan) -> bool:
        if frame.step is not None:
            return frame.step > index
        return any(row.value in step.outputs for row in frame.rows)

    later = (place for place, frame in enumerate(flow.frames) if is_later(frame))
    flow.frames.insert(next(later, len(flow.frames)), made)


def reached_by_failure(flow: DataFlow, batch: Batch) -> list[int]:
    """Values that may be why forward raised.

    What graphs returned to Python, what the operation that raised had read, and what was made
    between graphs and read by no operation.
    """
    keys: list[Key] = []
    read = {value for step in flow.steps for value in step.inputs}
    for index, event in enumerate(batch.events):
        if isinstance(event, GraphRun):
            values = event.stopped_at or event.plan.outputs
            keys += [(index, value) for value in values if value is not None]
        elif isinstance(event, GapOperation):
            raised = not event.outputs
            keys += [key for _, key in event.inputs if raised]
            keys += [key for _, key in event.outputs if flow.at[key] not in read]
    return [flow.at[key] for key in keys if key in flow.at]


def _ran(frame: FramePlan, flow: DataFlow) -> bool:
    """Whether the frame is none of a branch that was not taken, or of a body not looked into."""
    numbers = [flow.stats[row.value] for row in frame.rows if row.value is not None]
    return NOT_RUN not in numbers and LATER not in numbers


def _add_run(flow: DataFlow, run: GraphRun, number: Callable[[int], int]) -> None:
    steps = len(flow.steps)
    for step in run.plan.steps:
        flow.steps.append(
            replace(
                step,
                module=_renamed(step.module, run.names),
                inputs=tuple(map(number, step.inputs)),
                outputs=tuple(map(number, step.outputs)),
            )
        )
    for frame in (*run.plan.frames, *([] if run.raised is None else [run.raised])):
        flow.frames.append(
            replace(
                frame,
                name=_renamed(frame.name, run.names),
                rows=tuple(
                    row if row.value is None else replace(row, value=number(row.value))
                    for row in frame.rows
                ),
                step=None if frame.step is None else frame.step + steps,
                calls=(*run.calls, *frame.calls),
            )
        )


def _add_operation(
    flow: DataFlow, operation: GapOperation, at: dict[Key, int], batch: Batch
) -> None:
    flow.steps.append(
        Step(
            kind=operation.kind,
            module=operation.module,
            inputs=tuple(at[key] for _, key in operation.inputs),
            outputs=tuple(at[key] for _, key in operation.outputs),
            infinite_literal=operation.infinite_literal,
            limit_literal=operation.limit_literal,
            source=operation.source,
            counts=operation.counts,
        )
    )
    if not operation.framed:
        return
    rows = [RowPlan(label, at[key]) for label, key in operation.inputs]
    for label, key in operation.outputs:
        named = f"{label} ({batch.labels[key]})" if key in batch.labels else label
        rows.append(RowPlan(named, at[key]))
    if not operation.outputs:
        rows.append(RowPlan("output", note="raised"))
    flow.frames.append(
        FramePlan(
            operation.module,
            operation.kind,
            True,
            tuple(rows),
            operation.source,
            len(flow.steps) - 1,
            operation.calls,
        )
    )


def _add_module(flow: DataFlow, event: ModuleReturn, at: dict[Key, int]) -> None:
    rows = tuple(
        RowPlan(label, None if key is None else at[key], note) for label, key, note in event.rows
    )
    flow.frames.append(FramePlan(event.name, event.kind, False, rows, calls=event.calls))


def _renamed(name: str, names: tuple[str, str]) -> str:
    """A graph captured in one module may run for another of the same class."""
    captured, running = names
    if captured == running:
        return name
    if name == captured or name.startswith(captured + "."):
        return running + name[len(captured) :]
    return name


def _renamed_value(value: Value, names: tuple[str, str]) -> Value:
    if not value.role.is_standing or names[0] == names[1]:
        return value
    return replace(value, name=_renamed(value.name, names))


def tensor_of(batch: Batch, key: Key) -> Tensor | None:
    """The tensor of a weight, an input or a constant, while the batch is open and it is there."""
    tensor = _tensor_of(batch, key)
    if tensor is None:
        return None
    bare = unwrapped(tensor)  # the forward may have run under vmap or grad
    return bare if has_memory(bare) else None


def _tensor_of(batch: Batch, key: Key) -> Tensor | None:
    index, local = key
    if index == BETWEEN_GRAPHS:
        reference = batch.tensors.get(local)
        return reference() if reference is not None else None
    run = batch.events[index]
    assert isinstance(run, GraphRun)
    value = run.plan.values[local]
    if value.argument is None:
        attribute = nodes.attribute_of(run.graph_module, value.name)
        return attribute if isinstance(attribute, Tensor) else None
    return None if run.args is None else run.args[value.argument]
