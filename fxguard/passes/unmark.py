"""A captured graph to the graph that the model alone would have given: without marks."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxguard.graph import marks

__all__ = ["copy_of", "erase_marks", "without_marks"]


def without_marks(graph_module: GraphModule) -> GraphModule:
    """A copy of the graph as the model alone would have it."""
    graph, result, _ = copy_of(graph_module.graph)
    graph.output(result)
    erase_marks(graph)
    bare = GraphModule(graph_module, graph)
    bare.meta.update(graph_module.meta)
    return bare


def copy_of(original: Graph) -> tuple[Graph, Any, dict[Node, Node]]:
    """A copy of a graph that has no output node yet.

    Returns:
        The copy, what it would return, and the original's nodes with their copies.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    result = graph.graph_copy(original, copies)
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):  # AOTAutograd reads there where an input comes from
            copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return graph, result, copies


def erase_marks(graph: Graph) -> None:
    """Take the marks out of a graph. Nothing reads what they return."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in marks.MARKS:
            graph.erase_node(node)
