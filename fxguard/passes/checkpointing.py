"""Activation checkpointing in graphs that run eagerly, with the behaviour of plain Python.

TorchDynamo captures checkpointing as an operation that leaves the random state to a compiler.
Without one (``backend="eager"``), the recomputation in the backward draws other numbers: dropout
has a different mask than in the forward, and the gradients are wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from fxguard.passes.unmark import without_marks

__all__ = ["tag_activation_checkpoint", "with_repeatable_checkpoints"]


def tag_activation_checkpoint(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Replaces torch's operation of this name."""
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    # Early stopping would raise an exception in the body, which has no `finally` for its regions.
    return checkpoint(body, *args, **{**kwargs, "use_reentrant": False, "early_stop": False})


def with_repeatable_checkpoints(graph_module: GraphModule) -> GraphModule:
    """Let checkpoints in a graph and in its bodies repeat the random numbers of the forward.

    The graph is changed in place; bodies are copied, because other graphs may run them too.
    """
    for name, body in list(graph_module.named_children()):
        if isinstance(body, GraphModule) and any(map(_checkpoints, body.modules())):
            setattr(graph_module, name, with_repeatable_checkpoints(without_marks(body)))
    found = _checkpoints(graph_module)
    for node in found:
        node.target = tag_activation_checkpoint
    if found:
        graph_module.recompile()
    return graph_module


def _checkpoints(module: Module) -> list[Node]:
    if not isinstance(module, GraphModule):
        return []
    theirs = torch.ops.higher_order.tag_activation_checkpoint
    return list(module.graph.find_nodes(op="call_function", target=theirs))
