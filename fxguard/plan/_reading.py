"""The state of reading one graph: what is known so far, and the questions that readers ask."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from fxguard.graph import nodes, tables
from fxguard.graph.higher_order import Body, is_higher_order
from fxguard.graph.operations import is_move, read_node
from fxguard.plan._values import ValueTable, can_be_bad
from fxguard.plan.plan import FramePlan, RowPlan, Step
from fxguard.records import Role
from fxguard.source.lines import source_of_trace

__all__ = ["Reading"]


class Reading:
    """The part of one graph that has been read.

    The body of a higher-order operation has its own reading, which adds to the values and steps of
    the graph around it.

    Args:
        graph_module: the graph.
        names: ``id(module)`` to qualified name.
        root: qualified name of the module whose forward contains the graph.
        arguments: position of a graph input to its role and qualified name, where known.
        measured_inputs: roles of the inputs that are measured on entry.
        has_marks: whether modules left marks in the graph.
        outer: the reading of the graph around a body.
        inside: the bodies around this graph, see :class:`~fxguard.plan.plan.Check`.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        names: Mapping[int, str],
        root: str,
        *,
        arguments: Mapping[int, tuple[Role, str]] | None = None,
        measured_inputs: Collection[Role] = (Role.INPUT,),
        has_marks: bool = False,
        outer: Reading | None = None,
        inside: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.graph_module = graph_module
        self.names = names
        self.root = root
        self.arguments = arguments or {}
        self.measured_inputs = measured_inputs
        self.has_marks = has_marks
        self.nodes = list(graph_module.graph.nodes)
        table = None if outer is None else outer.table
        self.table: ValueTable = ValueTable(self.nodes, table, inside)
        self.body_inputs: dict[Node, int | None] = {}  # inputs of a body, with their values
        self.prefix = ""  # of the attributes of a body
        self.steps: list[Step] = [] if outer is None else outer.steps
        self.frames: list[FramePlan] = []
        self.frame_nodes: list[Node] = []  # the node of each frame
        self.outputs: tuple[int | None, ...] = ()
        self.entered: list[tuple[int, Node, int]] = []  # position, input of the graph, its value
        self.inputs_written: list[tuple[int, int | None]] = []  # Plan.written
        self.quantized: set[Node] = set()
        self.hidden = 0  # operations in the bodies of higher-order operations
        self.random = False
        # A graph from symbolic_trace has no example results, so everything may be a tensor.
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
        # Buffers are measured before writes, because a write to a part of a buffer changes the
        # buffer.
        memories = {nodes.memory_of(nodes.example_of(node)) for node in written} - {None}
        self.written = written | {
            node for node in self.nodes if nodes.memory_of(nodes.example_of(node)) in memories
        }

    # Places of nodes and values.

    def module_of(self, node: Node) -> str:
        """Qualified name of the module whose forward contains the node."""
        stack = list(nodes.stack_of(node).items())
        if node.op == "call_module":
            return str(node.target)
        return nodes.path_of(*stack[-1], self.names) if stack else self.root

    def inputs_with(self, role: Role) -> Iterator[tuple[int, int]]:
        """Position and value of the graph's inputs with a given role."""
        for position, _, value in self.entered:
            if self.table.values[value].role is role:
                yield position, value

    def child(self, node: Node, body: Body) -> Reading:
        """The reading of a body that a higher-order operation runs."""
        child = Reading(
            body.graph_module,
            self.names if self.has_marks else {},
            self.module_of(node),
            has_marks=self.has_marks,
            outer=self,
            inside=(*self.table.inside, (node.name, body.position)),
        )
        child.table.is_later = self.table.is_later
        child.prefix = f"{self.prefix}{body.name}."
        return child

    def step_of(self, node: Node, inputs: Sequence[int], outputs: Sequence[int]) -> Step:
        """The step of a node, with the values that it read and made."""
        call = self.calls[node]
        return Step(
            kind=call.kind,
            module=self.module_of(node),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            infinite_literal=call.infinite_literal,
            limit_literal=call.limit_literal,
            literals=call.literals,
            number_first=call.number_first,
            source=source_of_trace(node.meta.get("stack_trace")),
            node=node.name,
            inside=self.table.inside,
        )

    # Questions about an operation.

    def is_quantized(self, node: Node) -> bool:
        """Whether the result holds integers that represent other numbers."""
        kind = self.calls[node].kind
        if kind in tables.QUANTIZES:
            return True
        return kind not in tables.DEQUANTIZES and any(
            operand in self.quantized for operand in node.all_input_nodes
        )

    def is_move(self, node: Node) -> bool:
        """Whether the result has exactly the elements of the first operand."""
        call = self.calls[node]
        if not self.knows_results:
            return call.moves
        before = None if call.first is None else nodes.example_of(call.first)
        return is_move(call, before, nodes.example_of(node))

    def operands(self, node: Node) -> list[tuple[str, int]]:
        """The tensors that an operation reads, labelled in order of use."""
        rows: list[tuple[str, int]] = []
        position = 0
        for key, operand in self.calls[node].reads:
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
        """Whether an operand's range is informative: that of indices and masks is not."""
        return self.table.values[value].can_be_bad

    # Its results.

    def measure_results(self, node: Node) -> list[int | None]:
        """A value for each result that the operation returned; None if it cannot be bad."""
        call, example = self.calls[node], nodes.example_of(node)
        results: list[tuple[tuple[int, ...], Any]] = list(nodes.elements_of(example))
        if not self.knows_results and call.returns:
            results = [((), None)]
        made: list[int | None] = []
        # A backend may not even compute unread results, such as flex_attention's logsumexp.
        used = {str(u.args[1]) for u in node.users if u.target is operator.getitem}
        for path, result in results:
            is_left_out = is_higher_order(node) and path and str(path[0]) not in used
            if is_left_out or (result is not None and not can_be_bad(result)):
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

    def measure_changed(self, node: Node) -> list[tuple[str, Node, int]]:
        """(parameter, operand, value) of each operand that was written and not returned."""
        call = self.calls[node]
        changed = list(call.beside)
        if not call.returns or (self.knows_results and nodes.example_of(node) is None):
            changed += [("", operand) for operand in call.in_place]  # as ``x[i] = y`` does
        return [
            (name, each, self.table.add(each, (), Role.MADE, each.name, measure=True, after=node))
            for name, each in changed
            if not self.knows_results or can_be_bad(nodes.example_of(each))
        ]

    def write(self, node: Node, operand: Node, value: int | None) -> None:
        """Note that the last step wrote an operand, which now holds a value."""
        if value is None:
            return
        for before, after in self.table.write(node, operand, value):
            # The operation also changed a larger tensor that contains ``operand``.
            step = self.steps[-1]
            self.steps[-1] = replace(
                step, inputs=(*step.inputs, before), outputs=(*step.outputs, after)
            )

    def operation_frame(
        self,
        node: Node,
        inputs: list[tuple[str, int]],
        outputs: Sequence[int],
        changed: Sequence[tuple[str, Node, int]] = (),
    ) -> FramePlan:
        """Add the frame of the last step."""
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
