"""Inserts the checks of a Plan into a GraphModule, with one extra output."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.graph import higher_order, nodes, operations
from fxguard.graph.higher_order import BodyGraph
from fxguard.measure import func_levels
from fxguard.measure.branches_and_loops import slices
from fxguard.measure.ways import TRACEABLE, Way
from fxguard.passes import faults, writes
from fxguard.passes.unmark import copy_of, erase_marks
from fxguard.plan.plan import Check, Plan
from fxguard.plan.reader import make_plan
from fxguard.torch_names import PyTreeCodeGen

__all__ = ["PROVENANCE", "insert_checks", "with_checks"]

# These write to a part of a tensor, and no compiler measures the rest in the same kernel.
PARTLY = {"index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "setitem"}

PROVENANCE = "fxguard"  # key in Node.meta for the Check of a measuring node


def insert_checks(graph_module: GraphModule) -> tuple[GraphModule, Plan]:
    """Put a check after every operation of a graph.

    Args:
        graph_module: from ``torch.fx.symbolic_trace``, ``torch.export.export(...).module()``
            or TorchDynamo. It is not changed.

    Raises:
        FxguardError: when it is not a graph module.

    Returns:
        A new graph module that returns ``(original output, statistics)``, and the
        :class:`fxguard.plan.plan.Plan` that describes each row of the statistics. The statistics
        have shape ``[len(plan.checks), 2]``: abs min and abs max.

    Example:
        >>> guarded, plan = fxguard.insert_checks(torch.fx.symbolic_trace(model))
        >>> output, statistics = guarded(x)
        >>> for frame in fxguard.frames_of(plan, statistics):
        ...     print(frame.title, frame.rows[-1].abs_max)
    """
    if not isinstance(graph_module, GraphModule):
        raise UsageError(
            f"insert_checks needs a torch.fx.GraphModule, got {type(graph_module).__name__}"
        )
    plan = make_plan(graph_module)
    checked = _Checked(graph_module, plan.checks, TRACEABLE)
    if isinstance(codegen := graph_module.graph._codegen, PyTreeCodeGen):
        # torch.export: the graph returns leaves, and the code generator restores the structure.
        checked.graph.set_codegen(_with_statistics(codegen))
        return checked.returning((*checked.result, checked.statistics)), plan
    return checked.returning((checked.result, checked.statistics)), plan


def with_checks(
    graph_module: GraphModule,
    plan: Plan,
    way: Way,
    planting: faults.Planting | None = None,
    *,
    joined: bool = True,
) -> GraphModule:
    """A copy of the graph with the measurements of the plan.

    Args:
        graph_module: the graph of the plan. It returns a tuple, like graphs that TorchDynamo hands
            to a backend.
        plan: its plan.
        way: how to measure.
        planting: where to plant faults, for a test of the checks.
        joined: False if the graph runs uncompiled, and the caller joins the measurements.

    Returns:
        A graph that returns one more item: the statistics, with one row for each check, or a list
        of the inputs of ``way.collect``.
    """
    checked = _Checked(graph_module, plan.checks, way, planting=planting, joined=joined)
    assert isinstance(checked.result, (tuple, list)), "statistics need a place among the results"
    return checked.returning((*checked.result, checked.statistics))


def _add_examples(body: Graph) -> None:
    """Add examples to a body's results: loops of torch 2.11 check whether they share memory."""
    for node in body.output_node().all_input_nodes:
        if nodes.example_of(node) is None:
            node.meta["example_value"] = torch.empty((), device="meta")


def _with_statistics(codegen: PyTreeCodeGen) -> PyTreeCodeGen:
    """The same code generator, but the output is a pair: the old output and the statistics."""
    info = codegen.pytree_info
    assert info.out_spec is not None
    pair = trees.treespec_tuple([info.out_spec, trees.treespec_leaf()])
    return PyTreeCodeGen(info._replace(out_spec=pair))


def _waited(node: Node) -> Node:
    """What waits for what a collective of a graph brings: until then its numbers are others."""
    if not operations.is_collective(node.target):
        return node
    parts = (each for each in node.users if operations.name_of(each.target) == "getitem")
    users = [*node.users, *itertools.chain.from_iterable(part.users for part in parts)]
    waits = [each for each in users if operations.name_of(each.target) == "wait_tensor"]
    return max(waits, default=node)


class _Checked:
    """A graph that receives checks, and with it the bodies of higher-order operations.

    Attributes:
        graph: the copy, without an output node.
        result: what the output node returned.
        statistics: a node of shape ``[number of checks, 2]``, or the nodes that it is made of.
    """

    def __init__(
        self,
        original: GraphModule,
        checks: Sequence[Check],
        way: Way,
        depth: int = 0,
        planting: faults.Planting | None = None,
        joined: bool = True,
    ) -> None:
        self.original = original
        self.way = way
        self.planting = planting
        self.graph, self.result, copies = copy_of(original.graph)
        self.originals = {node.name: node for node in copies}
        self.copies = {node.name: copied for node, copied in copies.items()}
        self.checks = checks
        self.count = 0  # rows of the statistics
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        given = (nodes.example_of(self.originals[node.name]) for node in self.inputs)
        self.given = {nodes.memory_of(example) for example in given} - {None}
        self.behind: dict[Node, Node] = {}  # the last node that was put after another one
        self.bodies: dict[int, tuple[str, GraphModule]] = {}  # new bodies, by id of the old
        self.planted: dict[Node, Node] = {}  # results that may be made NaN, to what is read then
        items: list[Node] = []
        self.first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if planting is not None:
            with self.graph.inserting_before(self.first):
                self.switch = self.graph.get_attr(faults.SWITCH)
            if self.inputs:
                self.behind[self.inputs[-1]] = self.switch

        self.waiting: Node | None = None  # what waits to be measured, while the graph runs
        self.wait = {check for check in checks if self.may_wait(check, depth)}
        if self.wait:
            self.let_wait()

        # Checks in the bodies of one operation are consecutive.
        def operation_of(check: Check) -> str:
            return check.inside[depth][0] if len(check.inside) > depth else ""

        for operation, group in itertools.groupby(checks, operation_of):
            if operation:
                items.append(self.enter(operation, list(group), depth))
            else:
                items += map(self.measure, group)
        self.statistics: Any = items
        if self.waiting is not None:
            assert way.together is not None
            self.graph.call_function(way.together.measure, (self.waiting,))
        if joined:
            self.statistics = self.graph.call_function(way.collect, (items,))
        self.result = map_arg(self.result, lambda node: self.planted.get(node, node))

    def put(self, anchor: Node, function: Callable[..., Any], *args: Any) -> Node:
        """Call a function after a node, and after what was put there before."""
        if anchor.op == "placeholder":
            anchor = self.inputs[-1]  # nothing may come between inputs
        with self.graph.inserting_after(self.behind.get(anchor, anchor)):
            node = self.behind[anchor] = self.graph.call_function(function, args)
        return node

    def may_wait(self, check: Check, depth: int) -> bool:
        """Whether a value is measured together with others."""
        together = self.way.together
        if together is None or self.planting is not None or len(check.inside) > depth:
            return False
        if check.region_end is not None:
            return False
        example = nodes.example_of(self.originals[check.node])
        for index in check.path:
            example = example[index]
        return together.takes(example)

    def let_wait(self) -> None:
        """Begin with nothing that waits, and let nothing wait where it may be written."""
        together = self.way.together
        assert together is not None
        with self.graph.inserting_before(self.first):
            self.waiting = self.graph.call_function(together.begin)
        if self.inputs:
            self.behind[self.inputs[-1]] = self.waiting
        for name in writes.writers(self.original, self.wait):
            with self.graph.inserting_before(self.copies[name]):
                self.graph.call_function(together.measure, (self.waiting,))

    def measure(self, check: Check) -> Node:
        """Insert one check."""
        anchor, node = _waited(self.copies[check.after]), self.copies[check.node]
        source = node
        for index in check.path:
            node = self.put(anchor, operator.getitem, node, index)
        example = nodes.example_of(self.originals[check.node])
        if self.planting is not None and self.planting.can_plant(check, example):
            node = self.plant(check, source, anchor, node)
        if check.region_end is not None:
            node = self.put(anchor, func_levels.without_levels, node)
            anchor = self.copies[check.region_end]
        if check in self.wait:
            assert self.way.together is not None
            measured = self.put(anchor, self.way.together.later, self.waiting, node)
        else:
            measured = self.put(anchor, self._function_for(check, example), node)
        measured.meta[PROVENANCE] = check
        self.count += 1
        return measured

    def _function_for(self, check: Check, example: Any) -> Callable[..., Any]:
        """The function that measures the value of a check.

        The graph's inputs are in memory, also after a write to a part of one. A compiler may never
        write other values to memory, or measures them while writing.
        """
        in_memory = self.way.in_memory
        if in_memory is None or check.inside or check.region_end is not None:
            return self.way.abs_min_max
        for index in check.path:
            example = example[index] if isinstance(example, (tuple, list)) else None
        stands = not self.way.is_traceable or (not check.path and self._stands(check, example))
        return in_memory if stands and self.way.takes(example) else self.way.abs_min_max

    def _stands(self, check: Check, example: Any) -> bool:
        """Whether a compiler has the value of a check in memory anyway."""
        written = self.originals[check.after]
        return written.op == "placeholder" or (
            operations.name_of(written.target) in PARTLY and nodes.memory_of(example) in self.given
        )

    def plant(self, check: Check, source: Node, anchor: Node, node: Node) -> Node:
        """Let everything after a check read what was planted there."""
        assert self.planting is not None
        slot = self.planting.slots[check]
        planted = self.put(anchor, faults.plant, node, self.switch, slot)
        self.planting.planted.append(slot)
        read = [source]
        if check.path:
            read = [user for user in source.users if user.args[1:] == check.path]
        for result in read:
            self.planted[result] = planted
            result.replace_all_uses_with(planted, lambda user: user > planted)
        return planted

    def enter(self, operation: str, checks: Sequence[Check], depth: int) -> Node:
        """Insert the checks in the bodies of one higher-order operation."""
        original, node = self.originals[operation], self.copies[operation]
        kind = higher_order.kind_of(original)
        assert kind is not None
        changed: dict[int, _Checked] = {}
        bodies: dict[int, BodyGraph] = {}
        for body in higher_order.bodies_of(original, self.original):
            if body.position in kind.rewritten:
                mine = [c for c in checks if c.inside[depth] == (operation, body.position)]
                # The arguments of loops and branches leave no room for a switch.
                planting = None if kind.may_not_run else self.planting
                way = self.way if kind.is_plain else replace(self.way, together=None)
                inner = _Checked(body.graph_module, mine, way, depth + 1, planting)
                changed[body.position] = inner
                self.count += inner.count
                bodies[body.position] = BodyGraph(
                    inner.graph,
                    inner.result,
                    inner.statistics,
                    count=len(mine),
                    wide=any(check.wide for check in mine),
                    unintended=slices(not check.may_be_infinite for check in mine),
                )
        statistics = kind.let_out(self.graph, node, bodies)
        for position, inner in changed.items():
            self.replace_body(node, position, inner)
        return statistics

    def replace_body(self, node: Node, position: int, inner: _Checked) -> None:
        """Let an operation run the changed body."""
        old = id(inner.original)
        if old not in self.bodies:  # several operations may run one body
            name = f"{node.args[position].target}_checked"  # type: ignore[union-attr]
            self.bodies[old] = (name, inner.module())
            _add_examples(inner.graph)
        with self.graph.inserting_before(node):
            node.update_arg(position, self.graph.get_attr(self.bodies[old][0]))

    def returning(self, result: tuple[Any, ...]) -> GraphModule:
        """The finished copy, with this result."""
        self.graph.output(result)
        assert self.count == len(self.checks), "one row of the statistics for each check"
        return self.module()

    def module(self) -> GraphModule:
        """The copy, once it has an output node."""
        erase_marks(self.graph)
        root = copy.copy(self.original)
        for name, body in self.bodies.values():
            root.add_module(name, body)
        if self.planting is not None:
            root.register_buffer(faults.SWITCH, self.planting.switch, persistent=False)
        checked = GraphModule(root, self.graph)
        checked.meta.update(self.original.meta)
        self.graph.lint()
        return checked
