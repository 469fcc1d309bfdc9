"""Reads the bodies of higher-order operations into the Plan of the graph around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from fxguard.graph import higher_order
from fxguard.graph.higher_order import Body, HigherOrder
from fxguard.graph.operations import Call
from fxguard.graph.source_lines import source_of_trace
from fxguard.plan._module_frames import frames_by_data_flow
from fxguard.plan.plan import Step
from fxguard.records import Role

if TYPE_CHECKING:
    from fxguard.plan.reader import PlanReader

__all__ = ["read_bodies"]


def read_bodies(reader: PlanReader, node: Node, call: Call) -> bool:
    """Enter a higher-order operation, or count what it hides.

    Returns:
        Whether its results have their values now. Otherwise they are to be measured like those
        of any other operation.
    """
    kind, entered = call.kind, higher_order.kind_of(node)
    if entered is None:
        return hide(reader, node, f"inside {kind}")
    if reader.table.depth:
        return hide(reader, node, f"inside {kind} inside a torch.func region")
    try:
        bodies = entered.bodies(node, reader.graph_module)
    except (LookupError, TypeError, ValueError) as reason:  # another version's arguments
        return hide(reader, node, f"inside {kind} ({reason})")
    results = [read_body(reader, node, call, entered, body) for body in bodies]
    if entered.merges is None:
        reader.table.elements[node] = {
            (index,): value for index, value in enumerate(results[0]) if value is not None
        }
    else:
        merge(reader, node, call, entered, results)
    return True


def hide(reader: PlanReader, node: Node, reason: str) -> bool:
    """Count the operations of bodies that are not entered."""
    for body in higher_order.bodies_of(node, reader.graph_module):
        child = type(reader)(body.graph_module, reader.names, {}, reader.root)
        child.read()
        count = sum(step.counts for step in child.steps) + child.hidden
        reader.hidden += count
        reader.table.unchecked[reason] += count
        reader.random = True  # it may draw random numbers
    return False


def read_body(
    reader: PlanReader, node: Node, call: Call, entered: HigherOrder, body: Body
) -> list[int | None]:
    """Read one body; returns the values of its results."""
    names = reader.names if reader.has_marks else None
    inside = (*reader.table.inside, (node.name, body.position))
    child = type(reader)(body.graph_module, names, {}, reader.module_of(node), reader, inside)
    child.table.is_later = reader.table.is_later or entered.merges == "later"
    child.prefix = f"{reader.prefix}{body.name}."
    inputs = [n for n in child.nodes if n.op == "placeholder"]
    first_check = len(reader.table.checks)
    for index, (name, operand) in enumerate(zip(inputs, body.operands, strict=True)):
        value = reader.table.value_of(operand)
        if operand is None and index == 0 and entered.merges == "later":
            # What the operation itself computes and gives to its body.
            value = child.table.add(name, (), Role.MADE, name.name, measure=True)
            read = [operand for _, operand in reader.operands(call)]
            reader.steps.append(step_of(reader, node, call, read, [value]))
        if value is not None and index < body.carried and child.has_range(value):
            # What the iteration before handed on, or what the loop began with.
            carried = child.table.add(name, (), Role.MADE, name.name, measure=True)
            reader.steps.append(step_of(reader, node, call, [value], [carried]))
            value = carried
        child.given[name] = value
    child.read()
    if entered.merges == "loop":
        mark_intended(reader, first_check)
    reader.random = reader.random or child.random
    reader.hidden += child.hidden
    frames = child.frames if reader.has_marks else frames_by_data_flow(child, root=False)
    reader.frames += frames
    reader.frame_nodes += [node] * len(frames)
    for name, operand in zip(inputs, body.operands, strict=True):
        value = child.table.value_of(name)
        if value is not None and value != child.given[name] and isinstance(operand, Node):
            reader.table.write(node, operand, value)
    return [child.table.value_of(result) for result in body.results]


def mark_intended(reader: PlanReader, first_check: int) -> None:
    """Say which checks from one on may see an infinity that somebody wrote on purpose."""
    intended: set[int] = set()
    for step in reader.steps:
        if step.infinite_literal or step.limit_literal or intended.intersection(step.inputs):
            intended.update(step.outputs)
    checks = reader.table.checks
    for value in intended:
        slot = reader.table.values[value].slot
        if slot is not None and slot >= first_check:
            checks[slot] = replace(checks[slot], may_be_infinite=True)


def merge(
    reader: PlanReader,
    node: Node,
    call: Call,
    entered: HigherOrder,
    results: list[list[int | None]],
) -> None:
    """Results that are one body's or another's: the operation is a step of its own."""
    operands = reader.operands(call)
    outputs = [value for value in reader.measure_results(node, call) if value is not None]
    if not outputs:
        return
    inputs = [value for body in results for value in body if value is not None]
    inputs = [value for value in inputs if reader.has_range(value)]
    if entered.merges in ("loop", "later"):  # a loop may not have run at all
        inputs += [value for _, value in operands]
    reader.steps.append(step_of(reader, node, call, inputs, outputs))
    reader.frames.append(reader.operation_frame(node, operands, outputs))
    reader.frame_nodes.append(node)


def step_of(
    reader: PlanReader, node: Node, call: Call, inputs: Sequence[int], outputs: Sequence[int]
) -> Step:
    """The step of a node, with the values that it read and made."""
    return Step(
        kind=call.kind,
        module=reader.module_of(node),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        infinite_literal=call.infinite_literal,
        limit_literal=call.limit_literal,
        source=source_of_trace(node.meta.get("stack_trace")),
    )
