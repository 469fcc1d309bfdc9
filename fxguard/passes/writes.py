"""Where a graph writes values that wait to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import GraphModule, Node

from fxguard.graph import marks, nodes
from fxguard.graph.higher_order import is_higher_order
from fxguard.graph.operations import is_collective, is_custom, read_node
from fxguard.plan.plan import Check

__all__ = ["writers"]

# The memory of what a graph is given. It is taken for one: two inputs may overlap.
GIVEN = 0


def writers(graph_module: GraphModule, waiting: Iterable[Check]) -> list[str]:
    """The nodes that may write a value that was made before, and still waits.

    What waits is measured before such a node, so that nothing waits after it.

    Args:
        graph_module: the graph.
        waiting: the checks whose values wait.
    """
    memory = _Memory(graph_module)
    checks: dict[str, list[Check]] = {}
    for check in waiting:
        checks.setdefault(check.after, []).append(check)
    by_name = {node.name: node for node in graph_module.graph.nodes}
    found: list[str] = []
    kept: set[int | None] = set()  # the memory of what waits; None for some that is not known
    for node in graph_module.graph.nodes:
        if kept and node.op.startswith("call") and node.target not in marks.MARKS:
            written = _written(node, graph_module, memory)
            if None in written or (written and None in kept) or written & kept:
                found.append(node.name)
                kept.clear()
        for check in checks.get(node.name, ()):
            kept |= memory.of(by_name[check.node])
    return found


def _written(node: Node, graph_module: GraphModule, memory: _Memory) -> set[int | None]:
    """The memory that a node writes; None among it for some that is not known."""
    hides = node.op == "call_module" or is_higher_order(node)
    if hides or is_custom(node.target) or is_collective(node.target):
        return {None}
    written = read_node(node, graph_module).written
    return {each for operand in written for each in memory.of(operand)}


class _Memory:
    """The memory of each result of a graph, by a key."""

    def __init__(self, graph_module: GraphModule) -> None:
        given = (n for n in graph_module.graph.nodes if n.op in ("placeholder", "get_attr"))
        self.given = {each for node in given for each in _keys(node)}
        self.given.discard(None)

    def of(self, node: Node) -> set[int | None]:
        """All memory of a result, which may be several tensors."""
        if node.op in ("placeholder", "get_attr"):
            return {GIVEN}
        return {GIVEN if key in self.given else key for key in _keys(node)}


def _keys(node: Node) -> Iterator[int | None]:
    example = nodes.example_of(node)
    if example is None:
        yield None
    for _, tensor in nodes.elements_of(example):
        yield nodes.memory_of(tensor)
