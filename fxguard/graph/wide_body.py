"""The bodies of an ``autograd.Function`` in a wide dtype, for forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter

from fxguard import trees

__all__ = ["wide_body", "with_wide_dtypes"]

CASTS = frozenset({"float", "half", "bfloat16", "double"})


def with_wide_dtypes(values: Any, dtype: torch.dtype) -> Any:
    """Values with each floating-point dtype replaced by the wide one."""
    return trees.tree_map_only(
        torch.dtype, lambda given: dtype if given.is_floating_point else given, values
    )


def wide_body(module: GraphModule, dtype: torch.dtype) -> GraphModule:
    """A graph that computes in a wide dtype, on operands that are already wide.

    Args:
        module: the body.
        dtype: the wide one.
    """

    def run(*operands: Any) -> Any:
        return _WideBody(module, dtype).run(*operands)

    graph = Graph()
    inputs = [graph.placeholder(x.name) for x in module.graph.nodes if x.op == "placeholder"]
    graph.output(graph.call_function(run, tuple(inputs)))
    return GraphModule({}, graph)


class _WideBody(Interpreter):
    """Runs a body with every floating-point dtype in it replaced."""

    def __init__(self, module: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def wide(self, values: Any) -> Any:
        """Values with wide floating-point dtypes and tensors."""
        return trees.tree_map_only(
            Tensor,
            lambda x: x.to(self.dtype) if x.is_floating_point() else x,
            with_wide_dtypes(values, self.dtype),
        )

    def call_function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        args, kwargs = self.wide((args, kwargs))
        return super().call_function(target, args, kwargs)

    def call_method(self, target: str, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        args, kwargs = self.wide((args, kwargs))
        if target in CASTS:
            return args[0].to(self.dtype)
        return super().call_method(target, args, kwargs)
