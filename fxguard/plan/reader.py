"""Reads an FX graph into its Plan: which values to measure, which frames there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import marks, nodes, outputs, tables
from fxguard.graph.higher_order import is_higher_order
from fxguard.graph.operations import Call
from fxguard.graph.overwritten_inputs import overwritten_inputs
from fxguard.measure import func_levels
from fxguard.plan import _bodies
from fxguard.plan._module_frames import frames_by_data_flow, with_root_frame
from fxguard.plan._reading import Reading
from fxguard.plan.plan import FramePlan, Plan, RowPlan, link, merge_single_operations
from fxguard.records import NOT_MEASURED, Role, RowRole

__all__ = ["make_plan", "read"]


def make_plan(
    graph_module: GraphModule,
    names: Mapping[int, str] | None = None,
    arguments: Mapping[int, tuple[Role, str]] | None = None,
    root: str = "",
    *,
    weights_stay: bool = True,
    has_marks: bool = True,
) -> Plan:
    """Read a graph from TorchDynamo, ``symbolic_trace`` or ``torch.export``.

    Args:
        graph_module: the graph; it is not changed.
        names: ``id(module)`` to qualified name, if the model is available. Without it, the names
            are those kept in the graph, and module frames come from the data flow.
        arguments: position of a graph input to its role and qualified name, if the model is
            available.
        root: qualified name of the module whose forward contains the graph.
        weights_stay: whether weights still exist when a report is made; if not, they are measured
            where they enter the graph.
        has_marks: whether modules left marks in the graph; if not, module frames come from the data
            flow.
    """
    reading = Reading(
        graph_module,
        names or {},
        root,
        arguments=arguments,
        measured_inputs={Role.INPUT} if weights_stay else {Role.INPUT, Role.WEIGHT},
        has_marks=names is not None and has_marks,
    )
    read(reading)
    frames = reading.frames
    if not reading.has_marks:
        frames = with_root_frame(reading, frames_by_data_flow(reading))
    return Plan(
        values=tuple(reading.table.values),
        steps=tuple(reading.steps),
        frames=tuple(merge_single_operations(frames)),
        inputs=tuple(reading.inputs_with(Role.INPUT)),
        buffers=tuple(reading.inputs_with(Role.BUFFER)),
        written=tuple(reading.inputs_written),
        overwritten=overwritten_inputs(graph_module, reading.calls),
        outputs=reading.outputs,
        outputs_made_of=outputs.made_of(graph_module),
        handed_on=outputs.handed_on(graph_module, {at for at, _ in reading.inputs_written}),
        checks=tuple(reading.table.checks),
        later=tuple(reading.table.later),
        operations=sum(step.counts for step in reading.steps) + reading.hidden,
        unchecked=tuple(sorted(reading.table.unchecked.items())),
        random=reading.random,
    )


def read(reading: Reading) -> None:
    """Read a graph node by node, in order of execution."""
    position = 0
    for node in reading.nodes:
        if node.op == "placeholder":
            _read_placeholder(reading, node, position)
            position += 1
        elif node.op == "get_attr":
            _read_attribute(reading, node)
        elif node.op == "output":
            reading.outputs = tuple(
                reading.table.value_of(item) for item in nodes.leaves(node.args[0])
            )
        elif node.target is marks.module_returned:
            _read_module_return(reading, node)
        elif node.target is marks.value_named:
            _name_value(reading, str(node.args[0]), reading.table.value_of(node.args[1]))
        else:
            _read_operation(reading, node)
    if reading.entered:
        _read_end(reading)


def _read_end(reading: Reading) -> None:
    """Find which values the graph's inputs hold at its end."""
    for placeholder, (last, parts) in reading.table.in_parts.items():
        name, before = placeholder.name, reading.table.now[placeholder]
        value = reading.table.add(placeholder, (), Role.MADE, name, measure=True, after=last)
        reading.table.now[placeholder] = value
        reading.steps.append(link(reading.module_of(last), (before, *parts), value))
    # Running statistics that the graph does not read again have no value.
    unknown = {operand for call in reading.calls.values() for _, operand in call.apart}
    for position, node, before in reading.entered:
        now = reading.table.now[node]
        if now != before:
            reading.inputs_written.append((position, now))
        elif node in unknown:
            reading.inputs_written.append((position, None))


# Nodes before any operation.


def _read_placeholder(reading: Reading, node: Node, position: int) -> None:
    if node in reading.body_inputs:
        if (value := reading.body_inputs[node]) is not None:
            reading.table.now[node] = value
            reading.table.remember_memory(node)
        return
    example = nodes.example_of(node)
    if reading.knows_results and not isinstance(example, Tensor):
        return  # a size
    role, name = reading.arguments.get(position) or nodes.placeholder_role(node)
    # A weight does not change before the report, which reads it.
    measure = role in reading.measured_inputs or (role is Role.BUFFER and node in reading.written)
    reading.table.now[node] = reading.table.add(
        node, (), role, name, measure=measure, argument=position
    )
    reading.entered.append((position, node, reading.table.now[node]))
    reading.table.remember_memory(node)


def _read_attribute(reading: Reading, node: Node) -> None:
    target = str(node.target)
    attribute = nodes.attribute_of(reading.graph_module, target)
    if not isinstance(attribute, Tensor):
        return
    role = Role.CONSTANT
    if isinstance(attribute, torch.nn.Parameter):
        role = Role.WEIGHT
    elif not target.startswith("_tensor_constant"):
        role = Role.BUFFER
    measure = role is Role.BUFFER and node in reading.written
    name = reading.prefix + target
    reading.table.now[node] = reading.table.add(node, (), role, name, measure=measure)
    reading.table.remember_memory(node)


# Operations.


def _read_operation(reading: Reading, node: Node) -> None:
    call = reading.calls[node]
    kind = call.kind
    if kind in func_levels.ENTERS:
        reading.table.enter_region()
    elif kind in func_levels.LEAVES:
        reading.table.leave_region(node)
    if kind in tables.NOT_OPERATIONS:
        return
    reading.random = reading.random or call.random
    if is_higher_order(node) and _bodies.enter(reading, node, read):
        return
    if reading.is_quantized(node):
        reading.quantized.add(node)
        return
    if (kind == "getitem" or reading.is_move(node)) and _share(reading, node, call):
        return
    results = reading.measure_results(node)
    changed = reading.measure_changed(node)
    outputs = [value for value in results if value is not None]
    if outputs or changed:
        inputs = reading.operands(node)
        made = (*outputs, *(value for _, _, value in changed))
        reading.steps.append(reading.step_of(node, [value for _, value in inputs], made))
        if not call.selects:
            reading.frames.append(reading.operation_frame(node, inputs, outputs, changed))
            reading.frame_nodes.append(node)
        for operand, value in zip(call.in_place, results, strict=False):
            reading.write(node, operand, value)
        for _, operand, value in changed:
            reading.write(node, operand, value)
    _write_apart(reading, node, call)
    for operand in (*call.in_place, *(each for _, each in call.beside)):
        reading.table.note_write(operand, node)


def _write_apart(reading: Reading, node: Node, call: Call) -> None:
    """Add running statistics: they depend on their old values, and the result does not."""
    read_later = [each for _, each in call.apart if reading.table.is_read_after(each, node)]
    if not read_later:
        return
    operands = (reading.table.value_of(each) for each in (call.first, *read_later))
    inputs = [value for value in operands if value is not None]
    made = [
        reading.table.add(each, (), Role.MADE, each.name, measure=True, after=node)
        for each in read_later
    ]
    reading.steps.append(replace(reading.step_of(node, inputs, made), counts=False))
    for operand, value in zip(read_later, made, strict=True):
        reading.write(node, operand, value)


def _share(reading: Reading, node: Node, call: Call) -> bool:
    """Let the result hold the value of its source, if it was only moved or taken from there."""
    source = call.first
    if source is None:
        return False
    if call.kind != "getitem":
        if source not in reading.table.now:
            return False
        reading.table.now[node] = reading.table.now[source]
        reading.table.remember_memory(node, like=source)
        return True
    index = node.args[1]
    if source not in reading.table.elements or not isinstance(index, int):
        # An element of something that is not the result of an operation, such as a size.
        return isinstance(nodes.example_of(source), (tuple, list))
    for path, value in reading.table.elements[source].items():
        if path[0] == index and len(path) > 1:
            reading.table.elements.setdefault(node, {})[path[1:]] = value
        elif path[0] == index:
            reading.table.now[node] = value
            reading.table.remember_memory(node)
    return True


# Marks.


def _read_module_return(reading: Reading, node: Node) -> None:
    if not reading.module_of(node):  # the model called itself; the batch adds its frame
        return
    labels: Any = node.args[0]
    rows = []
    for label, tensor, note in marks.rows_of(labels, node.args[1:]):
        if tensor in reading.quantized:
            tensor, note = None, NOT_MEASURED
        value = reading.table.value_shown(tensor) if isinstance(tensor, Node) else None
        rows.append(RowPlan(label, value, note))
    stack = nodes.stack_of(node)
    kind = nodes.class_of(list(stack.values())[-1]) if stack else "Module"
    calls = nodes.calls_of(node)
    reading.frames.append(FramePlan(reading.module_of(node), kind, False, tuple(rows), calls=calls))
    reading.frame_nodes.append(node)


def _name_value(reading: Reading, label: str, value: int | None) -> None:
    """Add the user's name of a value to the row of the operation that made it."""
    for index, frame in enumerate(reading.frames):
        rows = tuple(
            replace(row, label=f"{row.label} ({label})")
            if value is not None and row.value == value and RowRole.of(row.label) is RowRole.OUTPUT
            else row
            for row in frame.rows
        )
        reading.frames[index] = replace(frame, rows=rows)
