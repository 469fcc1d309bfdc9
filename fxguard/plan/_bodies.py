"""Reads the bodies of higher-order operations into the Plan of the graph around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from fxguard.graph import higher_order
from fxguard.graph.higher_order import Body, HigherOrder
from fxguard.plan._module_frames import frames_by_data_flow
from fxguard.plan._reading import Reading
from fxguard.records import Role

__all__ = ["enter"]

Walk = Callable[[Reading], None]  # reads a graph from its first to its last node


def enter(reading: Reading, node: Node, read: Walk) -> bool:
    """Enter a higher-order operation, or count what it hides.

    Args:
        reading: the reading of the graph that contains it.
        node: the operation.
        read: reads a body's graph.

    Returns:
        Whether its results have their values now. If not, they have to be measured like those of
        any other operation.
    """
    kind, entered = reading.calls[node].kind, higher_order.kind_of(node)
    if entered is None:
        return _hide(reading, node, read, f"inside {kind}")
    if reading.table.depth:
        return _hide(reading, node, read, f"inside {kind} inside a torch.func region")
    try:
        bodies = entered.bodies(node, reading.graph_module)
    except (LookupError, TypeError, ValueError) as reason:  # arguments of another version
        return _hide(reading, node, read, f"inside {kind} ({reason})")
    results = [_read_body(reading, node, entered, body, read) for body in bodies]
    if entered.may_not_run or entered.only_a_second_run_sees:
        _merge(reading, node, entered, results)
    else:  # the results are the body's
        reading.table.elements[node] = {
            (index,): value for index, value in enumerate(results[0]) if value is not None
        }
    return True


def _hide(reading: Reading, node: Node, read: Walk, reason: str) -> bool:
    """Count the operations of bodies that are not entered."""
    for body in higher_order.bodies_of(node, reading.graph_module):
        child = Reading(body.graph_module, reading.names, reading.root)
        read(child)
        count = sum(step.counts for step in child.steps) + child.hidden
        reading.hidden += count
        reading.table.unchecked[reason] += count
        reading.random = True  # bodies may draw random numbers
    return False


def _read_body(
    reading: Reading, node: Node, entered: HigherOrder, body: Body, read: Walk
) -> list[int | None]:
    """Read one body; returns the values of its results."""
    child = reading.child(node, body)
    child.table.is_later |= entered.only_a_second_run_sees
    inputs = [n for n in child.nodes if n.op == "placeholder"]
    first_check = len(reading.table.checks)
    for index, (name, operand) in enumerate(zip(inputs, body.operands, strict=True)):
        value = reading.table.value_of(operand)
        if operand is None and index == 0 and entered.only_a_second_run_sees:
            # Computed by the operation itself and passed to its body.
            value = child.table.add(name, (), Role.MADE, name.name, measure=True)
            operands = [operand for _, operand in reading.operands(node)]
            reading.steps.append(reading.step_of(node, operands, [value]))
        if value is not None and index < body.carried and child.has_range(value):
            # From the previous iteration, or from the start of the loop.
            carried = child.table.add(name, (), Role.MADE, name.name, measure=True)
            reading.steps.append(reading.step_of(node, [value], [carried]))
            value = carried
        child.body_inputs[name] = value
    read(child)
    if entered.runs_many_times:
        _mark_intended(reading, first_check)
    reading.random = reading.random or child.random
    reading.hidden += child.hidden
    frames = child.frames if reading.has_marks else frames_by_data_flow(child)
    reading.frames += frames
    reading.frame_nodes += [node] * len(frames)
    for name, operand in zip(inputs, body.operands, strict=True):
        value = child.table.value_of(name)
        if value is not None and value != child.body_inputs[name] and isinstance(operand, Node):
            reading.table.write(node, operand, value)
    return [child.table.value_of(result) for result in body.results]


def _mark_intended(reading: Reading, first_check: int) -> None:
    """Mark the checks, from one on, that may see an intended infinity."""
    intended: set[int] = set()
    for step in reading.steps:
        if step.infinite_literal or step.limit_literal or intended.intersection(step.inputs):
            intended.update(step.outputs)
    checks = reading.table.checks
    for value in intended:
        slot = reading.table.values[value].slot
        if slot is not None and slot >= first_check:
            checks[slot] = replace(checks[slot], may_be_infinite=True)


def _merge(
    reading: Reading, node: Node, entered: HigherOrder, results: list[list[int | None]]
) -> None:
    """Add the operation as its own step if its results come from one body or another."""
    operands = reading.operands(node)
    outputs = [value for value in reading.measure_results(node) if value is not None]
    if not outputs:
        return
    inputs = [value for body in results for value in body if value is not None]
    inputs = [value for value in inputs if reading.has_range(value)]
    # A loop may not have run at all; an operation that hides its body may change its results.
    if entered.runs_many_times or entered.only_a_second_run_sees:
        inputs += [value for _, value in operands]
    reading.steps.append(reading.step_of(node, inputs, outputs))
    reading.frames.append(reading.operation_frame(node, operands, outputs))
    reading.frame_nodes.append(node)
