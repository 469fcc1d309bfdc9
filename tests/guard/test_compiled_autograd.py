"""A backward that TorchDynamo has compiled: its gradients are looked at, and stay as they are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.fx import GraphModule

import fxguard

pytestmark = pytest.mark.slow_unless_campaign


class Net(nn.Module):
    """Its gradient is infinite before `first`'s end where `factor` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        length = (hidden * self.factor).square().sum(-1, keepdim=True).sqrt()
        return self.last(length + hidden)  # type: ignore[no-any-return]


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4)


def as_it_is(graph: GraphModule) -> GraphModule:
    return graph


def compiled(backend: str, fullgraph: bool) -> Callable[[GraphModule], Any]:
    def compile_it(graph: GraphModule) -> Any:
        return torch.compile(graph, backend=backend, fullgraph=fullgraph)

    return compile_it


WAYS = {
    "as it is": as_it_is,
    **{
        f"{backend}, fullgraph={fullgraph}": compiled(backend, fullgraph)
        for backend, fullgraph in itertools.product(("eager", "aot_eager"), (True, False))
    },
    "inductor": compiled("inductor", False),
}


def in_each_way(*campaign: str) -> pytest.MarkDecorator:
    """Parametrize a test; these ways wait for the campaign."""
    cases = [
        pytest.param(way, id=name, marks=pytest.mark.campaign if name in campaign else ())
        for name, way in WAYS.items()
    ]
    return pytest.mark.parametrize("way", cases)


@in_each_way("aot_eager, fullgraph=True", "inductor")
def test_bad_gradients_are_said(way: Callable[[GraphModule], Any]) -> None:
    """Of each backward that has some the first one, with its weight; healthy ones are healthy."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(), on_detect=found.append)
    with compiled_autograd._enable(way):
        for factor in (1, 1, 0, 1, 0):
            model.factor.fill_(factor)
            model(inputs()).sum().backward()
    weights = ("first.weight", "first.bias")
    expected = [
        {f"batch {i}: gradient of weight {name} is NaN" for name in weights} for i in (2, 4)
    ]
    assert [report.message in texts for report, texts in zip(found, expected, strict=True)] == [
        True
    ] * 2
    why = "compiled autograd shows gradients of weights and inputs alone"
    assert found[0].verdict[1] == f"  which operation made it is not known: {why}"
    coverage = fxguard.guard_of(model).coverage()
    assert coverage.endswith(f"; 2 bad gradients without an operation: {why}")


@in_each_way("aot_eager, fullgraph=True")
def test_it_is_raised_from_backward(way: Callable[[GraphModule], Any]) -> None:
    """With `fullgraph=True` torch 2.13 fails on any error of a graph, with one of its own."""
    model = fxguard.instrument(Net())
    model.factor.zero_()
    loss = model(inputs()).sum()
    with (
        compiled_autograd._enable(way),
        pytest.raises((fxguard.NonFiniteError, RuntimeError)) as caught,
    ):
        loss.backward()
    ours = caught.value
    if not isinstance(ours, fxguard.NonFiniteError):
        assert "Attempt to trace generator" in str(ours)
        ours = ours.__context__
    assert isinstance(ours, fxguard.NonFiniteError)
    assert ours.report is fxguard.guard_of(model).last_report


@in_each_way("aot_eager, fullgraph=True", "inductor")
def test_nothing_changes(way: Callable[[GraphModule], Any]) -> None:
    """No gradient (under Inductor: but for its last bits), and nothing is compiled more often."""
    plain = Net()
    guarded = copy.deepcopy(plain)
    fxguard.instrument(guarded)
    graphs: dict[str, list[str]] = {}
    for name, model in (("plain", plain), ("guarded", guarded)):
        seen = graphs[name] = []

        def noted(graph: GraphModule, seen: list[str] = seen) -> Any:
            seen.append(str(graph.graph))
            return way(graph)

        with compiled_autograd._enable(noted):
            for _ in range(3):
                x = inputs().requires_grad_()  # another leaf in each step
                model(x).square().sum().backward()
    assert len(graphs["guarded"]) == len(graphs["plain"])
    pairs = zip(plain.parameters(), guarded.parameters(), strict=True)
    rtol = 1e-6 if way is WAYS["inductor"] else 0
    for one, other in pairs:
        torch.testing.assert_close(other.grad, one.grad, rtol=rtol, atol=0)


def test_a_switch_of_torch_turns_it_on() -> None:
    """As `torch._dynamo.config` describes it: the whole step is compiled."""
    torch._dynamo.reset()
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(), on_detect=found.append)
    model.factor.zero_()

    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def step(x: Tensor) -> None:
            model(x).sum().backward()

        step(inputs())
    assert [
        report.message.startswith("batch 0: gradient of weight first.") for report in found
    ] == [True]


def test_a_scaler_skips_the_step() -> None:
    """It may be the scale alone: a note, and no report."""
    torch._dynamo.reset()
    model = fxguard.instrument(Net(), on_detect="raise")
    model.factor.zero_()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with fxguard.watch(model), compiled_autograd._enable(compiled("eager", True)):
        scaler.scale(model(inputs()).sum()).backward()
        scaler.step(optimizer)
    notes = fxguard.guard_of(model).notes
    assert [note.message.startswith("gradient of weight first.") for note in notes] == [True]
