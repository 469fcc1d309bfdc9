"""A backward as a data flow: what an origin reached, what it grew from, what the user ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.testing.watch import as_module


def reports_of(model: Any, *args: Any, factor: float = 1.0, **options: Any) -> list[Any]:
    """What is reported of one forward and its backward."""
    found: list[fxguard.types.Report] = []
    module = fxguard.instrument(as_module(model), on_detect=found.append, **options)
    (module(*args).sum() * factor).backward()
    fxguard.remove(module)
    return found


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, requires_grad=True)


def test_each_origin_names_the_gradients_that_it_reached() -> None:
    """Two faults of one backward: neither is told of the leaf of the other."""

    def forward(x: Tensor, y: Tensor, both: Tensor) -> Tensor:
        return (x + both).sqrt().sum() + (y * both).pow(0.5).sum() + x.exp().sum()

    (report,) = reports_of(forward, leaf(0.0, 1.0), leaf(1.0, 1.0), leaf(0.0, 2.0))
    spread = {origin.what: (origin.spread, origin.spread_count) for origin in report.origins}
    assert spread == {
        "sqrt": (("the gradients of input[0]", "input[2]"), 2),
        "pow": (("the gradients of input[1]", "input[2]"), 2),
    }


def test_both_operands_of_one_operation_are_reached_by_one_origin() -> None:
    """An operation is told once, with all that its bad gradients reached."""
    (report,) = reports_of(torch.hypot, leaf(0.0), leaf(0.0))
    (origin,) = report.origins
    assert (origin.what, origin.row, origin.spread_count) == ("hypot", "grad of input[0]", 2)


class Deep(nn.Module):
    """Weights that make each gradient 1e12 times as large, with or without breaks of the graph."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(5))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.constant_(layer.weight, 0.5e12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "five graphs"])
def test_a_gradient_that_overflows_is_followed_to_where_it_grew(breaks: bool) -> None:
    """Back through later graphs, too; the numbers are those of the gradients themselves."""
    (report,) = reports_of(Deep(breaks), torch.full((1, 2), 1e-38))
    (origin,) = report.origins
    assert (origin.frame.title, origin.cause) == ("layers.1 linear (backward)", "overflow")
    titles = [f"layers.{i} linear (backward)" for i in (4, 3, 2)]
    assert [climb.title for climb in origin.climb] == titles
    assert [climb.before for climb in origin.climb] == pytest.approx([1.0, 1e12, 1e24])
    assert [climb.after for climb in origin.climb] == pytest.approx([1e12, 1e24, 1e36])
    text = str(report)
    assert "where the magnitude grew most on the way:" in text
    assert "1.00e+00 -> 1.00e+12  layers.4 linear (backward)" in text


def test_a_known_loss_scale_is_divided_out_of_the_climb() -> None:
    """The numbers are those of the backward that the report is about."""
    (report,) = reports_of(Deep(True), torch.full((1, 2), 1e-38), factor=1024.0, loss_scale=1024.0)
    assert report.origins[0].climb[0].before == 1.0


def test_nothing_grew_on_the_way_to_a_pole() -> None:
    """A derivative that is infinite has no climb in its report."""
    (report,) = reports_of(lambda x: (x * 3.0).sqrt(), leaf(0.0))
    assert "grew most" not in str(report)


def root(x: Tensor) -> Tensor:
    return x.sqrt()


def root_of_product(x: Tensor) -> Tensor:
    return (x * 2.0).sqrt()


@pytest.mark.parametrize("forward", [root, root_of_product])
def test_an_ignored_operation_is_not_reported_for_its_gradient(
    forward: Callable[[Tensor], Tensor],
) -> None:
    """Nor what the gradient went on to."""
    assert [r.origins[0].what for r in reports_of(forward, leaf(0.0))] == ["sqrt"]
    assert not reports_of(forward, leaf(0.0), ignore=["*:sqrt"])


@pytest.mark.parametrize(("ignored", "told"), [("sqrt", "pow"), ("pow", "sqrt")])
def test_another_operation_than_the_ignored_one_is_reported(ignored: str, told: str) -> None:
    """Both made a bad gradient of the same leaf."""

    def forward(x: Tensor) -> Tensor:
        return (x * 2.0).sqrt().sum() + (x * 1.0).pow(0.25).sum()

    (report,) = reports_of(forward, leaf(0.0), ignore=[f"*:{ignored}"])
    assert [origin.what for origin in report.origins] == [told]


def test_what_becomes_worse_after_an_ignored_operation_is_reported() -> None:
    """As in a forward: an infinity is ignored, the NaN that another operation makes of it is not.

    That the other operation is at fault is not said, because an infinity came in.
    """
    (report,) = reports_of(lambda x: (x * 0.0).sqrt(), leaf(2.0), ignore=["*:sqrt"])
    (origin,) = report.origins
    assert (origin.what, origin.problem, origin.cause) == ("mul", "nan", "unknown")
    assert "grad of output inf" in origin.operands


def test_nothing_is_said_of_a_derivative_that_read_what_an_ignored_operation_made() -> None:
    """Whatever the shapes are: the gradient of a weight, of which each element reads a column."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x * 0).sqrt()

    (report,) = reports_of(Net(), torch.ones(2, 4), ignore=["*:sqrt"])
    origin = report.origins[0]
    assert (origin.what, origin.problem, origin.cause) == ("linear", "nan", "unknown")
    assert (origin.dtype, origin.limit) == ("float32", torch.finfo(torch.float32).max)
    assert not origin.fixes
    assert "an ignored operation made it" in str(report)
