"""GraphModule and Plan to a GraphModule with checks and one extra output."""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.node import map_arg

from fxguard.errors import UsageError
from fxguard.graph import higher_order, marks, nodes
from fxguard.graph.higher_order import BodyGraph
from fxguard.measure import func_levels, traceable
from fxguard.measure.branches_and_loops import slices
from fxguard.plan.plan import Check, Plan
from fxguard.plan.reader import make_plan

__all__ = ["Arithmetic", "Planting", "insert_checks", "with_checks", "without_marks"]


def insert_checks(graph_module: GraphModule) -> tuple[GraphModule, Plan]:
    """Put a check after every operation of a graph.

    Args:
        graph_module: from ``torch.fx.symbolic_trace``, ``torch.export.export(...).module()``
            or TorchDynamo. It is not changed.

    Raises:
        FxguardError: when it is no graph module.

    Returns:
        A new graph module that returns ``(original output, statistics)``, and the
        :class:`fxguard.plan.plan.Plan` that says what each row of the statistics is. The
        statistics have shape ``[len(plan.checks), 2]``: abs min and abs max.

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
    return with_checks(graph_module, plan, flat=False), plan


class Arithmetic(Protocol):
    """How values are measured: :mod:`~fxguard.measure.traceable`, or a faster way."""

    def abs_min_max(self, value: Any) -> Any:
        """Measure one value."""

    def collect(self, items: Sequence[Any]) -> Tensor:
        """Join what was measured, and statistics of bodies: shape ``[rows, 2]``."""


def with_checks(
    graph_module: GraphModule,
    plan: Plan,
    *,
    flat: bool,
    arithmetic: Arithmetic = traceable,
    planting: Planting | None = None,
) -> GraphModule:
    """A copy of the graph that takes the measurements of the plan.

    Args:
        graph_module: the graph that the plan was made of.
        plan: its plan.
        flat: whether the statistics are one more item of the output, which has to be a tuple
            then (what TorchDynamo's backends expect), or the second of a pair.
        arithmetic: what measures.
        planting: where to plant faults, for a test of the checks.
    """
    changed = _Changed(graph_module, plan.checks, arithmetic, planting=planting)
    graph, result, statistics = changed.graph, changed.result, changed.statistics
    if isinstance(codegen := graph_module.graph._codegen, _PyTreeCodeGen):
        # torch.export: the graph returns leaves, and the code generator the structure.
        graph.set_codegen(_with_statistics(codegen))
        flat = True
    graph.output((*result, statistics) if flat else (result, statistics))
    return changed.module()


def without_marks(graph_module: GraphModule) -> GraphModule:
    """The graph as the model alone would have it."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    _keep_sources(copies)
    _erase_marks(graph)
    bare = GraphModule(graph_module, graph)
    bare.meta.update(graph_module.meta)
    return bare


def _keep_sources(copies: dict[Node, Node]) -> None:
    """AOTAutograd reads where the inputs come from."""
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]


def _erase_marks(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in marks.MARKS:
            graph.erase_node(node)


def _add_examples(body: Graph) -> None:
    """Loops of torch 2.11 look whether examples of what a body returns share memory."""
    for node in body.output_node().all_input_nodes:
        if nodes.example_of(node) is None:
            node.meta["example_value"] = torch.empty((), device="meta")


def _with_statistics(codegen: _PyTreeCodeGen) -> _PyTreeCodeGen:
    """The same inputs; the output is a pair of what it was and the statistics."""
    info = codegen.pytree_info
    assert info.out_spec is not None
    pair = pytree.treespec_tuple([info.out_spec, pytree.treespec_leaf()])
    return _PyTreeCodeGen(info._replace(out_spec=pair))


@dataclass(slots=True)
class Planting:
    """Makes what a check reads NaN, when its switch says so, for everything that reads it too."""

    switch: Tensor  # shape [], int64: which check, -1 for none
    slots: dict[Check, int]
    planted: list[int] = field(default_factory=list)  # those for which there is a place

    def can_plant(self, check: Check, example: Any) -> bool:
        """Whether a NaN can stand there."""
        for index in check.path:
            example = example[index]
        return (
            isinstance(example, Tensor)
            and example.dtype in traceable.FLOATS
            and example.layout is torch.strided
            and not example.is_nested
        )


def plant(value: Tensor, switch: Tensor, slot: int) -> Tensor:
    """``value``, or NaN in each of its elements."""
    return torch.where(switch == slot, math.nan, value)


SWITCH = "fxguard_switch"  # the buffer that holds it


class _Changed:
    """A graph that is being given checks, and with it the bodies of higher-order operations.

    Attributes:
        graph: the copy, without an output node.
        result: what the output node returned.
        statistics: a node of shape ``[number of checks, 2]``.
    """

    def __init__(
        self,
        original: GraphModule,
        checks: Sequence[Check],
        arithmetic: Arithmetic,
        depth: int = 0,
        planting: Planting | None = None,
    ) -> None:
        self.original = original
        self.arithmetic = arithmetic
        self.planting = planting
        self.graph = Graph()
        copies: dict[Node, Node] = {}
        self.result: Any = self.graph.graph_copy(original.graph, copies)
        _keep_sources(copies)
        self.originals = {node.name: node for node in copies}
        self.copies = {node.name: copied for node, copied in copies.items()}
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.behind: dict[Node, Node] = {}  # the last node that was put behind another one
        self.bodies: dict[int, tuple[str, GraphModule]] = {}  # new ones, by id of the old
        self.spoiled: dict[Node, Node] = {}  # results that may be made NaN, to what is read then
        items: list[Node] = []
        if planting is not None:
            first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
            with self.graph.inserting_before(first):
                self.switch = self.graph.get_attr(SWITCH)
            if self.inputs:
                self.behind[self.inputs[-1]] = self.switch

        # Checks in the bodies of one operation follow each other.
        def operation_of(check: Check) -> str:
            return check.inside[depth][0] if len(check.inside) > depth else ""

        for operation, group in itertools.groupby(checks, operation_of):
            if operation:
                items.append(self.enter(operation, list(group), depth))
            else:
                items += map(self.measure, group)
        self.statistics = self.graph.call_function(arithmetic.collect, (items,))
        self.result = map_arg(self.result, lambda node: self.spoiled.get(node, node))

    def put(self, anchor: Node, function: Callable[..., Any], *args: Any) -> Node:
        """Call a function behind a node, and behind what was put there before."""
        if anchor.op == "placeholder":
            anchor = self.inputs[-1]  # nothing may stand between them
        with self.graph.inserting_after(self.behind.get(anchor, anchor)):
            node = self.behind[anchor] = self.graph.call_function(function, args)
        return node

    def measure(self, check: Check) -> Node:
        """Insert one check."""
        anchor, node = self.copies[check.after], self.copies[check.node]
        source = node
        for index in check.path:
            node = self.put(anchor, operator.getitem, node, index)
        example = nodes.example_of(self.originals[check.node])
        if self.planting is not None and self.planting.can_plant(check, example):
            node = self.spoil(check, source, anchor, node)
        if check.region_end is not None:
            node = self.put(anchor, func_levels.without_levels, node)
            anchor = self.copies[check.region_end]
        return self.put(anchor, self.arithmetic.abs_min_max, node)

    def spoil(self, check: Check, source: Node, anchor: Node, node: Node) -> Node:
        """Let everything behind a check read what was planted there."""
        assert self.planting is not None
        slot = self.planting.slots[check]
        planted = self.put(anchor, plant, node, self.switch, slot)
        self.planting.planted.append(slot)
        read = [source]
        if check.path:
            read = [user for user in source.users if user.args[1:] == check.path]
        for result in read:
            self.spoiled[result] = planted
            result.replace_all_uses_with(planted, lambda user: user > planted)
        return planted

    def enter(self, operation: str, checks: Sequence[Check], depth: int) -> Node:
        """Insert the checks in the bodies of one higher-order operation."""
        original, node = self.originals[operation], self.copies[operation]
        kind = higher_order.kind_of(original)
        assert kind is not None
        changed: dict[int, _Changed] = {}
        bodies: dict[int, BodyGraph] = {}
        for body in higher_order.bodies_of(original, self.original):
            if body.position in kind.rewritten:
                mine = [c for c in checks if c.inside[depth] == (operation, body.position)]
                # A loop's and a branch's own arguments leave no room for a switch.
                planting = self.planting if kind.merges is None else None
                inner = _Changed(body.graph_module, mine, self.arithmetic, depth + 1, planting)
                changed[body.position] = inner
                bodies[body.position] = BodyGraph(
                    inner.graph,
                    inner.result,
                    inner.statistics,
                    count=len(mine),
                    wide=any(check.wide for check in mine),
                    telling=slices(not check.may_be_infinite for check in mine),
                )
        statistics = kind.let_out(self.graph, node, bodies)
        for position, inner in changed.items():
            self.replace_body(node, position, inner)
        return statistics

    def replace_body(self, node: Node, position: int, inner: _Changed) -> None:
        """Let an operation run the changed body."""
        old = id(inner.original)
        if old not in self.bodies:  # some bodies are run by more than one operation
            name = f"{node.args[position].target}_checked"  # type: ignore[union-attr]
            self.bodies[old] = (name, inner.module())
            _add_examples(inner.graph)
        with self.graph.inserting_before(node):
            node.update_arg(position, self.graph.get_attr(self.bodies[old][0]))

    def module(self) -> GraphModule:
        """The copy, once it has an output node."""
        _erase_marks(self.graph)
        root = copy.copy(self.original)
        for name, body in self.bodies.values():
            root.add_module(name, body)
        if self.planting is not None:
            root.register_buffer(SWITCH, self.planting.switch, persistent=False)
        checked = GraphModule(root, self.graph)
        checked.meta.update(self.original.meta)
        self.graph.lint()
        return checked
