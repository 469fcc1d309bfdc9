"""One graph may serve equal layers: each of them is told by its own name, with its own weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxguard

LAYERS = 4


class Layer(nn.Module):
    """A layer that TorchDynamo captures by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.breaks = True

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.lin(x))


class Rooted(Layer):
    """The root of a sum of squares has no derivative where they are 0."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.lin(x) + (self.lin(x) * 0).square().sum(-1, keepdim=True).sqrt()


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.h = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x


def test_weights_with_bad_gradients_have_their_own_names() -> None:
    """The last layer made the gradients bad, of its own weights first."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(Rooted), on_detect=found.append)
    model(torch.rand(2, 8)).sum().backward()
    (origin,) = found[0].origins
    assert origin.frame.name == f"h.{LAYERS - 1}"
    assert origin.spread_count == 2 * LAYERS
    names = {name.removeprefix("the gradients of ") for name in origin.spread}
    assert f"h.{LAYERS - 1}.lin.weight" in names
    assert len(names) == len(origin.spread)


@pytest.mark.parametrize("at", range(LAYERS))
def test_a_forecast_reads_the_weights_of_each_layer(at: int) -> None:
    """Only one of them does not fit."""
    model = Net()
    with torch.no_grad():
        model.h[at].lin.weight.mul_(1e30)
    rows = map(str, fxguard.forecast(model, torch.rand(2, 8)).rows)
    names = {row.partition(" ")[0].removesuffix(":") for row in rows}
    assert names == {f"h.{at}.lin", f"h.{at}.lin.weight"}


@pytest.mark.parametrize("at", [0, LAYERS - 1])
def test_compare_names_the_layer_whose_weight_differs(at: int) -> None:
    model = Net()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.h[at].lin.weight[0, 0] += 1
    text = str(fxguard.compare(model, other, torch.rand(2, 8)))
    assert f"a weight differs: h.{at}.lin.weight: 1 of 64 elements differ" in text


class Fading(Layer):
    """A layer whose gradients are a thousandth of what came in."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(self.lin(x)) * 1e-3


def test_lost_gradients_are_those_of_the_layers_that_lost_them() -> None:
    """The last layers still have theirs."""
    model = fxguard.instrument(Net(Fading).half())
    with pytest.warns(RuntimeWarning, match="are 0 in float16") as said:
        model(torch.rand(2, 8).half()).sum().backward()
    zero = {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}
    name = str(said[0].message).partition("all gradients of ")[2].partition(" ")[0]
    assert name in zero
    assert 0 < len(zero) < 2 * LAYERS


def test_coverage_counts_each_layer() -> None:
    """As many operations as in a model without breaks."""
    counted = []
    for breaks in (True, False):
        model = Net()
        for layer in model.h:
            layer.breaks = breaks
        fxguard.instrument(model)(torch.rand(2, 8))
        counted.append(fxguard.guard_of(model).coverage())
    broken, whole = counted
    assert str(whole).startswith(f"checked {2 * LAYERS} of {2 * LAYERS} operations in ")
    assert str(broken).startswith(f"checked {2 * LAYERS} of {2 * LAYERS} operations in 2 graphs")
