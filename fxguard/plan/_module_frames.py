"""Frames of modules in graphs without marks, derived from the data flow."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxguard.graph import nodes
from fxguard.plan._reading import Reading
from fxguard.plan.plan import FramePlan, RowPlan

__all__ = ["frames_by_data_flow", "with_root_frame"]


def frames_by_data_flow(reading: Reading) -> list[FramePlan]:
    """Add the frames of modules to those of operations, for graphs without marks.

    The nodes of one entry of ``nn_module_stack`` are one call of that module. Its inputs are values
    made outside and used inside; its outputs are values made inside and used outside. Both are
    numbered in order of use.
    """
    members: dict[str, list[Node]] = {}
    for node in reading.nodes:
        if node.op.startswith("call"):
            for call in nodes.calls_of(node):
                members.setdefault(call, []).append(node)

    ending: dict[Node, list[FramePlan]] = {}  # by the last node of a call
    for call, inside in members.items():
        last = inside[-1]
        stack = nodes.stack_of(last)
        if call not in stack or (last.op == "call_module" and nodes.calls_of(last)[-1] == call):
            continue  # a single operation, which has a frame
        calls = nodes.calls_of(last)[: list(stack).index(call) + 1]
        name = nodes.path_of(call, stack[call], reading.names)
        chosen = set(inside)
        inputs = [i for node in inside for i in node.all_input_nodes if i not in chosen]
        outputs = [node for node in inside if any(user not in chosen for user in node.users)]
        rows = (*_numbered(reading, "input", inputs), *_numbered(reading, "output", outputs))
        frame = FramePlan(name, nodes.class_of(stack[call]), False, rows, calls=calls)
        ending.setdefault(last, []).append(frame)

    frames: list[FramePlan] = []
    # A higher-order operation also has the frames of its bodies.
    operations: dict[Node, list[FramePlan]] = {}
    for node, frame in zip(reading.frame_nodes, reading.frames, strict=True):
        operations.setdefault(node, []).append(frame)
    for node in reading.nodes:
        frames += operations.get(node, [])
        # The innermost call returns first.
        frames += sorted(ending.get(node, []), key=lambda frame: -len(frame.calls))
    return frames


def with_root_frame(reading: Reading, frames: list[FramePlan]) -> list[FramePlan]:
    """Add a frame for the whole graph, unless a module's frame is that already."""
    if any(frame.name == "" and not frame.is_op for frame in frames):
        return frames
    placeholders = [node for node in reading.nodes if node.op == "placeholder"]
    outputs = reading.nodes[-1].all_input_nodes
    rows = (*_numbered(reading, "input", placeholders), *_numbered(reading, "output", outputs))
    return [*frames, FramePlan("", type(reading.graph_module).__name__, False, rows)]


def _numbered(reading: Reading, label: str, members: Sequence[Node]) -> tuple[RowPlan, ...]:
    values = dict.fromkeys(
        value for node in members if (value := reading.table.now.get(node)) is not None
    )
    kept = [value for value in values if not reading.table.values[value].role.is_standing]
    if label == "output" and len(kept) == 1:
        return (RowPlan(label, kept[0]),)
    return tuple(RowPlan(f"{label}[{i}]", value) for i, value in enumerate(kept))
