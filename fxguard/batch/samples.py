"""A few elements of a gradient: enough to tell whether another run made the same one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import nodes

__all__ = ["LARGE", "is_sample_of", "made_of", "sample_of"]

LARGE = 2**16  # elements, from which on a gradient is not kept where a sample will do
ELEMENTS = 64
TOLERANCE = 1e-3  # atomic additions of a GPU come in any order


def sample_of(gradient: Tensor) -> Tensor:
    """Elements on the diagonal of a tensor that has some."""
    with torch._C.DisableTorchFunction():
        places = tuple(
            torch.linspace(0, size - 1, ELEMENTS, device=gradient.device).long()
            for size in gradient.shape
        )
        return gradient.detach()[places]


def is_sample_of(sample: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor has these elements, but for roundings."""
    other = sample_of(gradient)
    largest = float(sample.nan_to_num(0, 0, 0).abs().amax())
    return torch.allclose(
        other.double(), sample.double(), TOLERANCE, TOLERANCE * largest, equal_nan=True
    )


def made_of(graph_module: GraphModule, output: int) -> frozenset[int]:
    """The outputs of a graph that one of its outputs is made of.

    Args:
        graph_module: the graph.
        output: position of that one.
    """
    (result,) = (node for node in graph_module.graph.nodes if node.op == "output")
    outputs = list(nodes.leaves(result.args[0]))
    todo, found = [outputs[output]], set[Node]()
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                todo.append(node)
    return frozenset(position for position, node in enumerate(outputs) if node in found)
