"""Which inputs a graph overwrites, so that a second run of it would find others there."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.higher_order import bodies_of, is_higher_order
from fxguard.graph.operations import Call, read_node
from fxguard.graph.tables import REPEATABLE

__all__ = ["overwritten_inputs"]


def overwritten_inputs(graph_module: GraphModule, calls: Mapping[Node, Call]) -> tuple[int, ...]:
    """Positions of the inputs that have to be copied before a run, to make a second one possible.

    Running statistics and counters are among them. A cache whose new rows are written at once and
    before anything of it is read is not: the second run finds the same rows there and writes them
    again. (What the cache held before that is gone: its range shows the new rows too.)

    Args:
        graph_module: the graph.
        calls: each of its nodes that calls something, to what it calls.
    """
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    memory: dict[Node, int] = {}
    for node in graph.nodes:
        for _, tensor in nodes.elements_of(nodes.example_of(node)):
            memory[node] = nodes.memory_of(tensor) or id(node)
    of_inputs = {memory[node] for node in inputs if node in memory}
    read: set[int] = set()  # or written
    overwritten: set[int] = set()
    for node, call in calls.items():
        operands = {memory[operand] for operand in node.all_input_nodes if operand in memory}
        if is_higher_order(node):
            if any(_writes(body.graph_module) for body in bodies_of(node, graph_module)):
                overwritten |= operands
            read |= operands
            continue
        others = [operand for _, operand in call.reads if operand not in call.in_place]
        sources = {memory[operand] for operand in others if operand in memory}
        places = {memory[operand] for operand in call.in_place if operand in memory}
        if call.overwrites or call.kind in REPEATABLE:
            at_once = {memory[place] for place in inputs if place in call.in_place}
            places -= at_once - read - sources
            read |= at_once
        changed = (*call.beside, *call.apart)
        overwritten |= places | {memory[operand] for _, operand in changed if operand in memory}
        if call.written:
            read |= sources
        elif memory.get(node) not in operands:  # a view reads nothing yet
            read |= operands
    return tuple(i for i, node in enumerate(inputs) if memory.get(node) in overwritten & of_inputs)


def _writes(graph_module: GraphModule) -> bool:
    calls = (node for node in graph_module.graph.nodes if node.op.startswith("call"))
    return any(read_node(node, graph_module).written for node in calls)
