"""How the outputs of a graph depend on each other and on its inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.marks import flatten_call

__all__ = ["handed_on", "made_of", "to_differentiate"]


def _outputs(graph_module: GraphModule) -> list[object]:
    (result,) = (node for node in graph_module.graph.nodes if node.op == "output")
    return list(nodes.leaves(result.args[0]))


def made_of(graph_module: GraphModule) -> tuple[frozenset[int], ...]:
    """For each output, the positions of other outputs that it depends on, as a loss on logits."""
    outputs = _outputs(graph_module)
    positions: dict[object, set[int]] = {}
    for position, output in enumerate(outputs):
        positions.setdefault(output, set()).add(position)
    above: dict[Node, frozenset[int]] = {}
    for node in graph_module.graph.nodes:
        read = node.all_input_nodes
        above[node] = frozenset().union(*(above[x] | positions.get(x, set()) for x in read))
    return tuple(above[x] if isinstance(x, Node) else frozenset() for x in outputs)


def handed_on(graph_module: GraphModule, written: Collection[int]) -> frozenset[int]:
    """The positions of outputs that are unchanged inputs.

    Args:
        graph_module: the graph.
        written: positions of the inputs that it writes.
    """
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    same = {node for position, node in enumerate(inputs) if position not in written}
    outputs = enumerate(_outputs(graph_module))
    return frozenset(position for position, output in outputs if output in same)


def to_differentiate(output: Any) -> list[Tensor]:
    """Tensors to begin a backward from: the ``loss`` that a model returns, or all its outputs."""
    made = getattr(output, "loss", None)
    returned = [made] if isinstance(made, Tensor) else flatten_call((), {}, output)[1]
    return [x for x in returned if x.requires_grad]
