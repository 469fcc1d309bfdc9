"""Removes the marks from a captured graph, which leaves the graph of the model alone."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxguard.graph import marks

__all__ = ["copy_of", "erase_marks", "without_marks"]


def without_marks(graph_module: GraphModule) -> GraphModule:
    """A copy of the graph without marks."""
    graph, result, _ = copy_of(graph_module.graph)
    graph.output(result)
    erase_marks(graph)
    bare = GraphModule(graph_module, graph)
    bare.meta.update(graph_module.meta)
    return bare


def copy_of(original: Graph) -> tuple[Graph, Any, dict[Node, Node]]:
    """A copy of a graph, still without an output node.

    Returns:
        The copy, what it would return, and the copy of each original node.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    result = graph.graph_copy(original, copies)
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):  # AOTAutograd reads the origin of an input there
            copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return graph, result, copies


def erase_marks(graph: Graph) -> None:
    """Erase the marks from a graph. Nothing reads their results."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in marks.MARKS:
            graph.erase_node(node)
