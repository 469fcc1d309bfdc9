"""Module frames that no mark announced, and the one frame of a module that is one operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from fxguard.graph import nodes
from fxguard.plan.plan import WHOLE_GRAPH, FramePlan, RowPlan

if TYPE_CHECKING:
    from fxguard.plan.reader import PlanReader

__all__ = ["frames_by_data_flow", "merge_root", "merge_single_operations"]


def merge_single_operations(frames: Iterable[FramePlan]) -> list[FramePlan]:
    """Give a module that is one operation one frame, not two."""
    merged: list[FramePlan] = []
    for frame in frames:
        if not frame.is_op and frame.calls and frame.step is None:
            inside = 0
            while inside < len(merged) and frame.calls[-1] in merged[-1 - inside].calls:
                inside += 1
            if inside == 1 and merged[-1].is_op and merged[-1].calls[-1] == frame.calls[-1]:
                single = merged.pop()
                frame = replace(frame, step=single.step, source=single.source)
        merged.append(frame)
    return merged


def merge_root(frames: list[FramePlan]) -> list[FramePlan]:
    """Give a root module of torch that is one operation, such as a ``Linear``, one frame."""
    if len(frames) != 2 or frames[1].is_op or frames[1].name or not frames[0].is_op:
        return frames
    operation, root = frames
    if operation.calls or operation.source is not None or operation.kind == WHOLE_GRAPH:
        return frames  # the user wrote it, and the frame shows its line; or it stands for many
    return [replace(root, step=operation.step)]


def frames_by_data_flow(reader: PlanReader, *, root: bool = True) -> list[FramePlan]:
    """Add the frames of modules to those of operations, for graphs without marks.

    The nodes of one entry of ``nn_module_stack`` are one call of that module. Its inputs are
    the values used inside and made outside, its outputs those made inside and used outside;
    both are numbered in order of use.
    """
    members: dict[str, list[Node]] = {}
    for node in reader.nodes:
        if node.op.startswith("call"):
            for call in nodes.calls_of(node):
                members.setdefault(call, []).append(node)

    ending: dict[Node, list[FramePlan]] = {}  # at a call's last node
    for call, inside in members.items():
        last = inside[-1]
        stack = nodes.stack_of(last)
        if call not in stack or (last.op == "call_module" and nodes.calls_of(last)[-1] == call):
            continue  # one operation, which has its frame
        calls = nodes.calls_of(last)[: list(stack).index(call) + 1]
        name = nodes.path_of(call, stack[call], reader.names)
        chosen = set(inside)
        inputs = [i for node in inside for i in node.all_input_nodes if i not in chosen]
        outputs = [node for node in inside if any(user not in chosen for user in node.users)]
        rows = (*_numbered(reader, "input", inputs), *_numbered(reader, "output", outputs))
        frame = FramePlan(name, nodes.class_of(stack[call]), False, rows, calls=calls)
        ending.setdefault(last, []).append(frame)

    frames: list[FramePlan] = []
    # A higher-order operation has the frames of its bodies too.
    operations: dict[Node, list[FramePlan]] = {}
    for node, frame in zip(reader.frame_nodes, reader.frames, strict=True):
        operations.setdefault(node, []).append(frame)
    for node in reader.nodes:
        frames += operations.get(node, [])
        # The innermost call returns first.
        frames += sorted(ending.get(node, []), key=lambda frame: -len(frame.calls))
    if root and not any(frame.name == "" and not frame.is_op for frame in frames):
        frames.append(_root_frame(reader))
    return frames


def _root_frame(reader: PlanReader) -> FramePlan:
    placeholders = [node for node in reader.nodes if node.op == "placeholder"]
    outputs = reader.nodes[-1].all_input_nodes
    rows = (*_numbered(reader, "input", placeholders), *_numbered(reader, "output", outputs))
    return FramePlan("", type(reader.graph_module).__name__, False, rows)


def _numbered(reader: PlanReader, label: str, members: Sequence[Node]) -> tuple[RowPlan, ...]:
    values = dict.fromkeys(
        value for node in members if (value := reader.table.now.get(node)) is not None
    )
    kept = [value for value in values if not reader.table.values[value].role.is_standing]
    if label == "output" and len(kept) == 1:
        return (RowPlan(label, kept[0]),)
    return tuple(RowPlan(f"{label}[{i}]", value) for i, value in enumerate(kept))
