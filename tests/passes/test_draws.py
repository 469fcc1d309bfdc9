"""A graph that returns what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from fxguard.graph.operations import read_call
from fxguard.passes.draws import draws_from, with_draws

X = torch.linspace(0, 3, 12).view(3, 4)


def graph_of(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The graph that TorchDynamo captures of a function."""
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return graphs[0]


def drops(x: Tensor) -> Tensor:
    return fn.dropout(x, 0.4) + fn.dropout(input=x, p=0.3)


def drops_in_place(x: Tensor) -> Tensor:
    y = fn.dropout(x * 1, 0.4, True, True)
    y.add_(1)
    return y * torch.rand_like(y)


def draws_and_writes(x: Tensor) -> Tensor:
    mask = torch.ones_like(x).bernoulli_(0.5)
    y = x * mask
    mask.fill_(7)
    return y + mask


def drops_in_a_checkpoint(x: Tensor) -> Tensor:
    return (
        checkpoint(lambda y: fn.dropout(y.exp(), 0.5) * torch.randn(4), x, use_reentrant=False) + 1
    )


@pytest.mark.parametrize(
    ("function", "count"),
    [(drops, 2), (drops_in_place, 2), (draws_and_writes, 1), (drops_in_a_checkpoint, 2)],
)
def test_it_computes_and_draws_what_it_did(function: Callable[..., Any], count: int) -> None:
    """With the same state of the generator, bit for bit; and the graph itself is not changed."""
    graph = graph_of(function, X)
    before = graph.code
    made, drawn = with_draws(graph)
    assert graph.code == before
    assert len(drawn) == len({each.place for each in drawn}) == count
    torch.manual_seed(3)
    expected, state = graph(X), torch.get_rng_state()
    torch.manual_seed(3)
    *results, one, other = [*made(X), None][: len(expected) + 2]
    assert torch.equal(torch.get_rng_state(), state)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=0)
    if function is drops:
        assert one.dtype is other.dtype is torch.bool
        torch.testing.assert_close(results[0], X * one / 0.6 + X * other / 0.7)
    if function is draws_and_writes:
        torch.testing.assert_close(results[0], X * one + 7)


def test_what_may_run_often_or_never_is_left_out() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: fn.dropout(y, 0.5), lambda y: y.sin(), (x,))

    graph = graph_of(branch, X)
    assert draws_from(graph) == "cond"
    assert not with_draws(graph).drawn


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        ((fn.dropout, (X,), {}), True),
        ((fn.dropout, (X, 0.5, False), {}), False),
        ((fn.dropout, (X,), {"training": False}), False),
        ((fn.dropout, (X, 0.0), {}), False),
        ((torch.dropout, (X, 0.5, True), {}), True),
        ((torch.dropout, (X,), {"p": 0.5, "train": False}), False),
        ((fn.dropout2d, (X.view(1, 3, 2, 2),), {"p": 0}), False),
        ((fn.scaled_dot_product_attention, (X, X, X), {}), False),
        ((fn.scaled_dot_product_attention, (X, X, X, None, 0.1), {}), True),
        ((torch.rand_like, (X,), {}), True),
    ],
)
def test_a_dropout_that_drops_nothing_draws_nothing(call: Any, draws: bool) -> None:
    function, args, kwargs = call
    assert read_call(function, args, kwargs).random is draws
    torch.manual_seed(0)
    before = torch.get_rng_state()
    given = (X.view(1, 1, 3, 4),) * 3 if function is fn.scaled_dot_product_attention else args[:1]
    function(*given, *args[len(given) :], **kwargs)
    assert torch.equal(before, torch.get_rng_state()) is not draws
