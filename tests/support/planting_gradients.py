"""Bad gradients, planted at operands of operations of captured graphs.

The planter puts an identity in front of one operand. Its backward spoils one element of the
gradient. Whether a weight's gradient is bad afterwards decides what fxguard has to say: the planted
operation, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import fxguard
from fxguard.capture.backend import CheckingBackend
from fxguard.graph import marks
from support import zoo

BAD = (math.nan, math.inf)


class Spoiled(torch.autograd.Function):
    """The same numbers; one element of the gradient is bad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return x.clone()  # what follows may write it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        spoiled = gradient.clone()
        if spoiled.numel():
            spoiled[(0,) * spoiled.dim()] = ctx.bad
        return spoiled, None


def planted(x: Tensor, bad: float) -> Tensor:
    """The operation that is put in front of an operand."""
    result: Tensor = Spoiled.apply(x, bad)  # type: ignore[no-untyped-call]
    return result


@dataclass(slots=True)
class Planter:
    """Counts the operands of all graphs, and plants at one of them."""

    site: int | None = None  # None: only count
    bad: float = math.nan
    count: int = 0
    is_planted: bool = False

    def plant(self, graph_module: GraphModule) -> None:
        """Rewrite a graph that TorchDynamo has captured."""
        for node, operand in list(_edges(graph_module)):
            if self.count == self.site:
                with graph_module.graph.inserting_before(node):
                    before = graph_module.graph.call_function(planted, (operand, self.bad))
                before.meta = dict(operand.meta)
                node.replace_input_with(operand, before)
                self.is_planted = True
            self.count += 1
        graph_module.recompile()


def _edges(graph_module: GraphModule) -> Iterator[tuple[Node, Node]]:
    for node in graph_module.graph.nodes:
        if not node.op.startswith("call") or node.target in marks.MARKS:
            continue
        for operand in node.all_input_nodes:
            example = operand.meta.get("example_value")
            is_tensor = isinstance(example, Tensor) and example.is_floating_point()
            if is_tensor and example.requires_grad:
                yield node, operand


def reports_and_bad_leaves(
    entry: zoo.Entry, planter: Planter, patch: pytest.MonkeyPatch, compiler: str | None = None
) -> tuple[list[fxguard.types.Report], list[str]]:
    """One training step with a planted gradient: what is reported, and which weights turned bad."""
    original: Callable[..., Any] = CheckingBackend.__call__

    def call(self: Any, graph_module: GraphModule, examples: Any) -> Any:
        planter.plant(graph_module)
        return original(self, graph_module, examples)

    torch._dynamo.reset()
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(entry.model(train=True), on_detect=found.append)
    run: Any = model if compiler is None else torch.compile(model, backend=compiler)
    args, kwargs = entry.inputs(torch.float32, False)
    torch.manual_seed(1)
    with patch.context() as here:
        here.setattr(CheckingBackend, "__call__", call)
        zoo.loss_of(run(*args, **kwargs)).backward()
    return found, [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and not bool(weight.grad.isfinite().all())
    ]
