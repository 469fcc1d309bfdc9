"""An FX graph to its Plan: which values to measure, which frames there are."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import marks, nodes, tables
from fxguard.graph.higher_order import is_higher_order
from fxguard.graph.operations import Call, is_move, read_node
from fxguard.measure import func_levels
from fxguard.plan._bodies import read_bodies, step_of
from fxguard.plan._module_frames import frames_by_data_flow, merge_single_operations
from fxguard.plan._values import ValueTable
from fxguard.plan.plan import NOT_MEASURED, FramePlan, Plan, RowPlan, Step
from fxguard.records import Role

__all__ = ["PlanReader", "make_plan"]


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
        names: ``id(module)`` to qualified name, where the model is at hand. Without it the
            names are those that the graph remembers, and module frames come from data flow.
        arguments: position of a graph input to its role and qualified name, likewise.
        root: qualified name of the module whose forward the graph is, or is a part of.
        weights_stay: whether weights are still there when a report is made; otherwise they are
            measured where they enter the graph.
        has_marks: whether modules left marks in the graph; where they did not, module frames come
            from data flow.
    """
    reader = PlanReader(graph_module, names, arguments or {}, root)
    reader.measured_inputs |= set() if weights_stay else {Role.WEIGHT}
    reader.has_marks = reader.has_marks and has_marks
    reader.read()
    frames = reader.frames if reader.has_marks else frames_by_data_flow(reader)
    return Plan(
        values=tuple(reader.table.values),
        steps=tuple(reader.steps),
        frames=tuple(merge_single_operations(frames)),
        inputs=tuple(reader.inputs_with(Role.INPUT)),
        buffers=tuple(reader.inputs_with(Role.BUFFER)),
        written=tuple(reader.inputs_written),
        outputs=reader.outputs,
        checks=tuple(reader.table.checks),
        later=tuple(reader.table.later),
        operations=sum(step.counts for step in reader.steps) + reader.hidden,
        unchecked=tuple(sorted(reader.table.unchecked.items())),
        random=reader.random,
    )


class PlanReader:
    """Reads one graph, node by node, in order of execution."""

    def __init__(
        self,
        graph_module: GraphModule,
        names: Mapping[int, str] | None,
        arguments: Mapping[int, tuple[Role, str]],
        root: str,
        outer: PlanReader | None = None,
        inside: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.graph_module = graph_module
        self.root = root
        self.has_marks = names is not None
        self.names = names or {}
        self.arguments = arguments
        self.nodes = list(graph_module.graph.nodes)
        table = None if outer is None else outer.table
        self.table: ValueTable = ValueTable(self.nodes, table, inside)
        self.given: dict[Node, int | None] = {}  # values of a body's inputs
        self.prefix = ""  # of a body's attributes
        self.steps: list[Step] = [] if outer is None else outer.steps
        self.frames: list[FramePlan] = []
        self.frame_nodes: list[Node] = []  # which node each frame belongs to
        self.outputs: tuple[int | None, ...] = ()
        self.entered: list[tuple[int, Node, int]] = []  # position, input of the graph, its value
        self.inputs_written: list[tuple[int, int | None]] = []  # Plan.written
        self.quantized: set[Node] = set()
        self.measured_inputs = {Role.INPUT}
        self.hidden = 0  # operations in the bodies of higher-order operations
        self.random = False
        # A graph from symbolic_trace has no example results: everything may be a tensor.
        self.knows_results = any(
            nodes.example_of(node) is not None for node in self.nodes if node.op != "output"
        )
        self.calls = {
            node: read_node(node, graph_module) for node in self.nodes if node.op.startswith("call")
        }
        written: set[Node] = set()
        for node, call in self.calls.items():
            written.update(operand for _, operand in call.beside)
            written.update(call.in_place)
            written.update(x for _, x in call.apart if self.table.is_read_after(x, node))
        # What is to be measured before that: a write to a part of a buffer changes the buffer.
        memories = {nodes.memory_of(nodes.example_of(node)) for node in written} - {None}
        self.written = written | {
            node for node in self.nodes if nodes.memory_of(nodes.example_of(node)) in memories
        }

    def read(self) -> None:
        position = 0
        for node in self.nodes:
            if node.op == "placeholder":
                self.read_placeholder(node, position)
                position += 1
            elif node.op == "get_attr":
                self.read_attribute(node)
            elif node.op == "output":
                self.outputs = tuple(
                    self.table.value_of(item) for item in nodes.leaves(node.args[0])
                )
            elif node.target is marks.module_returned:
                self.read_module_return(node)
            elif node.target is marks.value_named:
                self.name_value(str(node.args[0]), self.table.value_of(node.args[1]))
            else:
                self.read_operation(node)
        if self.entered:
            self.read_end()

    def read_end(self) -> None:
        """Find what the graph's inputs hold when it ends."""
        for placeholder, (last, parts) in self.table.in_parts.items():
            name, before = placeholder.name, self.table.now[placeholder]
            value = self.table.add(placeholder, (), Role.MADE, name, measure=True, after=last)
            self.table.now[placeholder] = value
            link = Step("view", self.module_of(last), (before, *parts), (value,), counts=False)
            self.steps.append(link)
        # Running statistics that nothing in the graph reads again have no value.
        unknown = {operand for call in self.calls.values() for _, operand in call.apart}
        for position, node, before in self.entered:
            now = self.table.now[node]
            if now != before:
                self.inputs_written.append((position, now))
            elif node in unknown:
                self.inputs_written.append((position, None))

    def inputs_with(self, role: Role) -> Iterator[tuple[int, int]]:
        """Position and value of the graph's inputs that have a role."""
        for position, _, value in self.entered:
            if self.table.values[value].role is role:
                yield position, value

    # What stands in the graph before any operation.

    def read_placeholder(self, node: Node, position: int) -> None:
        if node in self.given:
            if (value := self.given[node]) is not None:
                self.table.now[node] = value
                self.table.remember_memory(node)
            return
        example = nodes.example_of(node)
        if self.knows_results and not isinstance(example, Tensor):
            return  # a size
        role, name = self.arguments.get(position) or nodes.placeholder_role(node)
        # A weight does not change between here and the report, which reads it then.
        measure = role in self.measured_inputs or (role is Role.BUFFER and node in self.written)
        self.table.now[node] = self.table.add(
            node, (), role, name, measure=measure, argument=position
        )
        self.entered.append((position, node, self.table.now[node]))
        self.table.remember_memory(node)

    def read_attribute(self, node: Node) -> None:
        target = str(node.target)
        attribute = nodes.attribute_of(self.graph_module, target)
        if not isinstance(attribute, Tensor):
            return
        role = Role.CONSTANT
        if isinstance(attribute, torch.nn.Parameter):
            role = Role.WEIGHT
        elif not target.startswith("_tensor_constant"):
            role = Role.BUFFER
        measure = role is Role.BUFFER and node in self.written
        name = self.prefix + target
        self.table.now[node] = self.table.add(node, (), role, name, measure=measure)
        self.table.remember_memory(node)

    # Operations.

    def read_operation(self, node: Node) -> None:
        call = self.calls[node]
        kind = call.kind
        if kind in func_levels.ENTERS:
            self.table.enter_region()
        elif kind in func_levels.LEAVES:
            self.table.leave_region(node)
        if kind in tables.NOT_OPERATIONS:
            return
        self.random = self.random or call.random
        if is_higher_order(node) and read_bodies(self, node, call):
            return
        if self.is_quantized(node, kind):
            self.quantized.add(node)
            return
        if (kind == "getitem" or self.is_move(node, call)) and self.share(node, call):
            return
        results = self.measure_results(node, call)
        changed = self.measure_changed(node, call)
        outputs = [value for value in results if value is not None]
        if outputs or changed:
            inputs = self.operands(call)
            made = (*outputs, *(value for _, _, value in changed))
            self.steps.append(step_of(self, node, call, [value for _, value in inputs], made))
            if not call.selects:
                self.frames.append(self.operation_frame(node, inputs, outputs, changed))
                self.frame_nodes.append(node)
            for operand, value in zip(call.in_place, results, strict=False):
                self.write(node, operand, value)
            for _, operand, value in changed:
                self.write(node, operand, value)
        self.write_apart(node, call)

    def write(self, node: Node, operand: Node, value: int | None) -> None:
        """The last step wrote an operand, which now holds a value."""
        if value is None:
            return
        for before, after in self.table.write(node, operand, value):
            # The operation also changed a larger tensor that ``operand`` is a part of.
            step = self.steps[-1]
            self.steps[-1] = replace(
                step, inputs=(*step.inputs, before), outputs=(*step.outputs, after)
            )

    def write_apart(self, node: Node, call: Call) -> None:
        """Running statistics: made of what they held, which the result is not made of."""
        read_later = [each for _, each in call.apart if self.table.is_read_after(each, node)]
        if not read_later:
            return
        read = (self.table.value_of(each) for each in (call.first, *read_later))
        inputs = [value for value in read if value is not None]
        made = [
            self.table.add(each, (), Role.MADE, each.name, measure=True, after=node)
            for each in read_later
        ]
        self.steps.append(replace(step_of(self, node, call, inputs, made), counts=False))
        for operand, value in zip(read_later, made, strict=True):
            self.write(node, operand, value)

    def is_quantized(self, node: Node, kind: str) -> bool:
        if kind in tables.QUANTIZES:
            return True
        return kind not in tables.DEQUANTIZES and any(
            operand in self.quantized for operand in node.all_input_nodes
        )

    def is_move(self, node: Node, call: Call) -> bool:
        if not self.knows_results:
            return call.moves
        before = None if call.first is None else nodes.example_of(call.first)
        return is_move(call, before, nodes.example_of(node))

    def share(self, node: Node, call: Call) -> bool:
        """Let the result hold the value of what it was moved or taken from."""
        source = call.first
        if source is None:
            return False
        if call.kind != "getitem":
            if source not in self.table.now:
                return False
            self.table.now[node] = self.table.now[source]
            self.table.remember_memory(node, like=source)
            return True
        index = node.args[1]
        if source not in self.table.elements or not isinstance(index, int):
            # The element of something that is no result of an operation, such as a size.
            return isinstance(nodes.example_of(source), (tuple, list))
        for path, value in self.table.elements[source].items():
            if path[0] == index and len(path) > 1:
                self.table.elements.setdefault(node, {})[path[1:]] = value
            elif path[0] == index:
                self.table.now[node] = value
                self.table.remember_memory(node)
        return True

    def measure_results(self, node: Node, call: Call) -> list[int | None]:
        """A value for each result that the operation returned; None where it cannot be bad."""
        example = nodes.example_of(node)
        results: list[tuple[tuple[int, ...], Any]] = list(nodes.elements_of(example))
        if not self.knows_results and call.returns:
            results = [((), None)]
        made: list[int | None] = []
        # A backend may not even make what nobody reads, such as flex_attention's logsumexp.
        used = {str(u.args[1]) for u in node.users if u.target is operator.getitem}
        for path, result in results:
            is_left_out = is_higher_order(node) and path and str(path[0]) not in used
            if is_left_out or (result is not None and not _can_overflow(result)):
                made.append(None)
                continue
            value = self.table.add(node, path, Role.MADE, node.name, measure=True)
            if path:
                self.table.elements.setdefault(node, {})[path] = value
            else:
                self.table.now[node] = value
                self.table.remember_memory(node)
            made.append(value)
        return made

    def measure_changed(self, node: Node, call: Call) -> list[tuple[str, Node, int]]:
        """(parameter, operand, value) of what it wrote and did not return."""
        changed = list(call.beside)
        if not call.returns or (self.knows_results and nodes.example_of(node) is None):
            changed += [("", operand) for operand in call.in_place]  # as ``x[i] = y`` does
        return [
            (name, each, self.table.add(each, (), Role.MADE, each.name, measure=True, after=node))
            for name, each in changed
            if not self.knows_results or _can_overflow(nodes.example_of(each))
        ]

    # Rows.

    def operands(self, call: Call) -> list[tuple[str, int]]:
        """The tensors that the operation reads, labelled in order of use."""
        rows: list[tuple[str, int]] = []
        position = 0
        for key, operand in call.reads:
            found = (
                [self.table.now[operand]]
                if operand in self.table.now
                else self.table.elements.get(operand, {}).values()
            )
            for value in found:
                if not self.has_range(value):
                    continue
                if self.table.values[value].role is Role.WEIGHT:
                    label = self.table.values[value].name.rpartition(".")[2]
                elif key is not None:
                    label = f"input[{key}]"
                else:
                    label, position = f"input[{position}]", position + 1
                rows.append((label, value))
        return rows

    def has_range(self, value: int) -> bool:
        """Whether a range explains an operand: that of indices and masks does not."""
        return self.table.values[value].can_be_bad

    # Frames.

    def operation_frame(
        self,
        node: Node,
        inputs: list[tuple[str, int]],
        outputs: Sequence[int],
        changed: Sequence[tuple[str, Node, int]] = (),
    ) -> FramePlan:
        """The frame of the last step."""
        step = self.steps[-1]
        is_module = node.op == "call_module"
        values = self.table.values
        weights = [RowPlan(*row) for row in inputs if values[row[1]].role is Role.WEIGHT]
        others = [RowPlan(*row) for row in inputs if values[row[1]].role is not Role.WEIGHT]
        if len(outputs) == 1:
            made = [("output", outputs[0])]
        else:
            made = [(f"output[{i}]", value) for i, value in enumerate(outputs)]
        if not outputs and len(changed) == 1:
            made = [("output", changed[0][2])]
        else:
            made += [(f"output[{name or i}]", value) for i, (name, _, value) in enumerate(changed)]
        return FramePlan(
            name=str(node.target) if is_module else step.module,
            kind=step.kind,
            is_op=not is_module,
            rows=(
                *([] if is_module else weights),
                *others,
                *(RowPlan(*row) for row in made),
            ),
            source=step.source,
            step=len(self.steps) - 1,
            calls=nodes.calls_of(node),
        )

    def read_module_return(self, node: Node) -> None:
        if not self.module_of(node):  # the model called itself; its frame comes with the batch
            return
        labels: Any = node.args[0]
        rows = []
        for label, tensor, note in marks.rows_of(labels, node.args[1:]):
            if tensor in self.quantized:
                tensor, note = None, NOT_MEASURED
            elif tensor is not None and tensor not in self.table.now:
                # Integers are measured for this row only.
                self.table.now[tensor] = self.table.add(
                    tensor, (), Role.MADE, tensor.name, measure=True
                )
            rows.append(RowPlan(label, self.table.value_of(tensor), note))
        stack = nodes.stack_of(node)
        kind = nodes.class_of(list(stack.values())[-1]) if stack else "Module"
        calls = nodes.calls_of(node)
        self.frames.append(FramePlan(self.module_of(node), kind, False, tuple(rows), calls=calls))
        self.frame_nodes.append(node)

    def name_value(self, label: str, value: int | None) -> None:
        """Say in the row of the operation that made a value what the user calls it."""
        for index, frame in enumerate(self.frames):
            rows = tuple(
                replace(row, label=f"{row.label} ({label})")
                if value is not None and row.value == value and row.label.startswith("output")
                else row
                for row in frame.rows
            )
            self.frames[index] = replace(frame, rows=rows)

    def module_of(self, node: Node) -> str:
        """Qualified name of the module in whose forward the node stands."""
        stack = list(nodes.stack_of(node).items())
        if node.op == "call_module":
            return str(node.target)
        return nodes.path_of(*stack[-1], self.names) if stack else self.root


def _can_overflow(example: Any) -> bool:
    return isinstance(example, Tensor) and (example.is_floating_point() or example.is_complex())
