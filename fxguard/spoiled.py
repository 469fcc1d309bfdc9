"""Which inputs a graph spoils for a second run of itself."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from fxguard import nodes, operations
from fxguard.higher_order import bodies_of, is_higher_order

__all__ = ["spoiled_inputs"]

# These write what does not depend on what was there: to do it twice is to do it once.
REPEATABLE = frozenset(
    """
    __setitem__ copy_ fill_ index_copy_ index_fill_ masked_fill_ scatter_ setitem zero_
    """.split()
)


def spoiled_inputs(graph_module: GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that have to be copied before a run, to make a second one possible.

    Running statistics and counters are among them. A cache whose new rows are written before
    anything of it is read is not: the second run finds the same rows there and writes them again.
    (What the cache held before that is gone: its range shows the new rows too.)
    """
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    memory: dict[Node, int] = {}
    for node in graph.nodes:
        for _, tensor in nodes.elements_of(nodes.example_of(node)):
            memory[node] = nodes.memory_of(tensor) or id(node)
    given = {memory[node] for node in inputs if node in memory}
    read: set[int] = set()
    spoiled: set[int] = set()
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        operands = {memory[operand] for operand in node.all_input_nodes if operand in memory}
        if is_higher_order(node):
            if any(_writes(body.graph_module.graph) for body in bodies_of(node, graph_module)):
                spoiled |= operands
            read |= operands
            continue
        written = operations.written_operands(node)
        places = {memory[operand] for operand in written if operand in memory}
        others = [operand for operand in node.all_input_nodes if operand not in written]
        sources = {memory[operand] for operand in others if operand in memory}
        repeatable = operations.name_of(node.target) in REPEATABLE
        spoiled |= {place for place in places if not repeatable or place in read | sources}
        spoiled |= {memory[o] for o in operations.ignored_operands(node) if o in memory}
        if not (written or memory.get(node) in operands):  # a view reads nothing yet
            read |= operands
        elif written:
            read |= sources
    return tuple(i for i, node in enumerate(inputs) if memory.get(node) in spoiled & given)


def _writes(graph: Graph) -> bool:
    return any(
        node.op.startswith("call")
        and (operations.written_operands(node) or operations.ignored_operands(node))
        for node in graph.nodes
    )
