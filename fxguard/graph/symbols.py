"""Whether a graph was captured for more than one size."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from fxguard.graph.nodes import elements_of, example_of

__all__ = ["has_symbols"]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_symbols(graph_module: GraphModule) -> bool:
    """Whether a value of the graph is a symbol, or a size of one is."""
    examples = [example_of(node) for node in graph_module.graph.nodes]
    tensors = [tensor for example in examples for _, tensor in elements_of(example)]
    sizes = [size for tensor in tensors for size in tensor.shape]
    return any(isinstance(each, SYMBOLS) for each in (*examples, *sizes))
