"""Which inputs a graph writes, as far as it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxguard.graph.overwritten_inputs import written_inputs


def graph_of(function: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
    found: list[torch.fx.GraphModule] = []

    def collect(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=collect, fullgraph=True)(*args)
    return found[0]


@torch.library.custom_op("fxguard_written::both", mutates_args=("a",))
def both(a: Tensor, b: Tensor) -> None:
    a.copy_(b)


def in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b) * 2


def in_a_view(a: Tensor, b: Tensor) -> Tensor:
    a.view(-1)[1:3].fill_(1.0)
    return a + b


def only_reads(a: Tensor, b: Tensor) -> Tensor:
    return (a * 2).add_(b)


def whole(a: Tensor, b: Tensor) -> Tensor:
    return a.copy_(b) + 1


def unknown(a: Tensor, b: Tensor) -> Tensor:
    both(a, b)
    return a + b.relu_()


@pytest.mark.parametrize(
    ("function", "written", "more"),
    [
        (in_place, {0}, False),
        (in_a_view, {0}, False),
        (only_reads, set(), False),
        (whole, {0}, False),
        (unknown, {0, 1}, True),
    ],
)
def test_what_a_graph_writes(
    function: Callable[..., Tensor], written: set[int], more: bool
) -> None:
    """Through views, too; an operation of somebody else may write what it does not name."""
    graph = graph_of(function, torch.ones(2, 2), torch.ones(2, 2))
    assert written_inputs(graph) == (written, more)
