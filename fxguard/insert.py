"""GraphModule and Plan to a GraphModule with checks and one extra output."""

from __future__ import annotations

import operator
from typing import Any

import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen

from fxguard import marks, stats
from fxguard.errors import UsageError
from fxguard.plan import Plan
from fxguard.planner import make_plan

__all__ = ["insert_checks", "with_checks"]


def insert_checks(graph_module: GraphModule) -> tuple[GraphModule, Plan]:
    """Put a check after every operation of a graph.

    Args:
        graph_module: from ``torch.fx.symbolic_trace``, ``torch.export.export(...).module()``
            or TorchDynamo. It is not changed.

    Raises:
        FxguardError: when it is no graph module.

    Returns:
        A new graph module that returns ``(original output, statistics)``, and the
        :class:`fxguard.plan.Plan` that says what each row of the statistics is. The
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


def with_checks(graph_module: GraphModule, plan: Plan, *, flat: bool) -> GraphModule:
    """A copy of the graph that takes the measurements of the plan.

    Args:
        graph_module: the graph that the plan was made of.
        plan: its plan.
        flat: whether the statistics are one more item of the output, which has to be a tuple
            then (what TorchDynamo's backends expect), or the second of a pair.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    result: Any = graph.graph_copy(graph_module.graph, copies)
    for original, copied in copies.items():
        # AOTAutograd reads where the inputs come from.
        if hasattr(original, "_dynamo_source"):
            copied._dynamo_source = original._dynamo_source  # type: ignore[attr-defined]
    by_name = {original.name: copied for original, copied in copies.items()}
    pairs = _insert_checks(graph, plan, by_name)
    statistics = graph.call_function(stats.collect, (pairs,))
    if isinstance(codegen := graph_module.graph._codegen, _PyTreeCodeGen):
        # torch.export: the graph returns leaves, and the code generator the structure.
        graph.set_codegen(_with_statistics(codegen))
        flat = True
    graph.output((*result, statistics) if flat else (result, statistics))
    for node in list(graph.nodes):
        if node.target in (marks.module_returned, marks.value_named):
            graph.erase_node(node)
    checked = GraphModule(graph_module, graph)
    checked.meta.update(graph_module.meta)
    graph.lint()
    return checked


def _with_statistics(codegen: _PyTreeCodeGen) -> _PyTreeCodeGen:
    """The same inputs; the output is a pair of what it was and the statistics."""
    info = codegen.pytree_info
    assert info.out_spec is not None
    pair = pytree.treespec_tuple([info.out_spec, pytree.treespec_leaf()])
    return _PyTreeCodeGen(info._replace(out_spec=pair))


def _insert_checks(graph: Graph, plan: Plan, by_name: dict[str, Node]) -> list[Node]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    behind: dict[Node, Node] = {}  # the last node that was put behind another one
    pairs = []
    for check in plan.checks:
        anchor = by_name[check.after]
        if anchor.op == "placeholder":
            anchor = placeholders[-1]  # nothing may stand between them
        node = by_name[check.node]
        for index in check.path:
            with graph.inserting_after(behind.get(anchor, anchor)):
                node = behind[anchor] = graph.call_function(operator.getitem, (node, index))
        with graph.inserting_after(behind.get(anchor, anchor)):
            pair = behind[anchor] = graph.call_function(stats.abs_min_max, (node,))
        pairs.append(pair)
    return pairs
