"""Which inputs a graph writes, and which writes would change the inputs of a second run."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.higher_order import bodies_of, is_higher_order
from fxguard.graph.operations import Call, is_custom, read_node
from fxguard.graph.tables import REPEATABLE

__all__ = ["overwritten_inputs", "written_inputs"]


def overwritten_inputs(graph_module: GraphModule, calls: Mapping[Node, Call]) -> tuple[int, ...]:
    """Positions of the inputs that must be copied before a run, to make a second run possible.

    Running statistics and counters are among them. A cache whose new rows are written at once,
    before any of it is read, is not: the second run finds the same rows and writes them again. (The
    old contents of the cache are gone, so its range includes the new rows.)

    Args:
        graph_module: the graph.
        calls: each calling node to its call.
    """
    inputs = _inputs_of(graph_module)
    memory = _memory_in(graph_module)
    of_inputs = {memory[node] for node in inputs if node in memory}
    read: set[int] = set()  # or already written
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


def written_inputs(graph_module: GraphModule) -> tuple[frozenset[int], bool]:
    """Positions of the inputs that a graph certainly writes, and whether it may write others."""
    memory = _memory_in(graph_module)
    written: set[int] = set()
    may_write_more = False
    for node in graph_module.graph.nodes:
        if node.op.startswith("call"):
            operands = {*read_node(node, graph_module).written}
            written.update(memory[operand] for operand in operands & memory.keys())
            is_known = operands <= memory.keys() and node.op != "call_module"
            is_known = is_known and not is_higher_order(node) and not is_custom(node.target)
            may_write_more = may_write_more or not is_known
    inputs = enumerate(_inputs_of(graph_module))
    return frozenset(i for i, node in inputs if memory.get(node) in written), may_write_more


def _inputs_of(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _memory_in(graph_module: GraphModule) -> dict[Node, int]:
    """Which results share memory."""
    return {
        node: nodes.memory_of(tensor) or id(node)
        for node in graph_module.graph.nodes
        for _, tensor in nodes.elements_of(nodes.example_of(node))
    }


def _writes(graph_module: GraphModule) -> bool:
    calls = (node for node in graph_module.graph.nodes if node.op.startswith("call"))
    return any(read_node(node, graph_module).written for node in calls)
