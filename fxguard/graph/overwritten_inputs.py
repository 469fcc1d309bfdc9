"""Which inputs a graph spoils for a second run of itself."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.higher_order import bodies_of, is_higher_order
from fxguard.graph.operations import read_node
from fxguard.graph.tables import REPEATABLE

__all__ = ["spoiled_inputs"]


def spoiled_inputs(graph_module: GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that have to be copied before a run, to make a second one possible.

    Running statistics and counters are among them. A cache whose new rows are written at once and
    before anything of it is read is not: the second run finds the same rows there and writes them
    again. (What the cache held before that is gone: its range shows the new rows too.)
    """
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    memory: dict[Node, int] = {}
    for node in graph.nodes:
        for _, tensor in nodes.elements_of(nodes.example_of(node)):
            memory[node] = nodes.memory_of(tensor) or id(node)
    given = {memory[node] for node in inputs if node in memory}
    read: set[int] = set()  # or written
    spoiled: set[int] = set()
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        operands = {memory[operand] for operand in node.all_input_nodes if operand in memory}
        if is_higher_order(node):
            if any(_writes(body.graph_module) for body in bodies_of(node, graph_module)):
                spoiled |= operands
            read |= operands
            continue
        call = read_node(node, graph_module)
        others = [operand for _, operand in call.reads if operand not in call.in_place]
        sources = {memory[operand] for operand in others if operand in memory}
        places = {memory[operand] for operand in call.in_place if operand in memory}
        if call.overwrites or call.kind in REPEATABLE:
            at_once = {memory[given_node] for given_node in inputs if given_node in call.in_place}
            places -= at_once - read - sources
            read |= at_once
        changed = (*call.beside, *call.apart)
        spoiled |= places | {memory[operand] for _, operand in changed if operand in memory}
        if call.written:
            read |= sources
        elif memory.get(node) not in operands:  # a view reads nothing yet
            read |= operands
    return tuple(i for i, node in enumerate(inputs) if memory.get(node) in spoiled & given)


def _writes(graph_module: GraphModule) -> bool:
    calls = (node for node in graph_module.graph.nodes if node.op.startswith("call"))
    return any(read_node(node, graph_module).written for node in calls)
