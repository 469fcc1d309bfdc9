"""A bad gradient that a loss gives to what the model returned, whatever the model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard

CAME_IN = "gradient of what the model returned came in as NaN"


@torch.compiler.disable
def in_python(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Net(nn.Module):
    """Two layers, with what is asked for before, between and after them."""

    def __init__(self, between: Callable[[Tensor], Tensor], last: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between, self.last = between, last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.b(self.between(self.a(x))))


class Spoils(torch.autograd.Function):
    """A loss whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.full(ctx.shape, float("nan"))


def said(model: nn.Module, loss: Callable[[Any], Tensor]) -> str:
    found: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model, on_detect=found.append)
    loss(guarded(torch.rand(2, 4))).backward()
    return found[0].origins[0].message


@pytest.mark.parametrize("last", [torch.sin, in_python], ids=["in a graph", "in Python"])
@pytest.mark.parametrize("between", [torch.sin, in_python], ids=["one graph", "a gap"])
def test_it_is_said_to_have_come_in(
    between: Callable[[Tensor], Tensor], last: Callable[[Tensor], Tensor]
) -> None:
    assert said(Net(between, last), Spoils.apply) == CAME_IN


def test_one_output_of_several() -> None:
    model = Net(in_python, lambda x: {"a": x.sin(), "b": x.tanh()})
    assert said(model, lambda out: out["a"].sum() + Spoils.apply(out["b"])) == CAME_IN


def test_an_output_that_the_model_reads_itself_is_not_accused() -> None:
    """Its gradient may be bad because of what the model made of it."""

    def last(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (in_python(x) * 0).sqrt()

    message = said(Net(in_python, last), lambda out: out[0].sum() + out[1].sum())
    assert "came in" not in message
    assert "sqrt" in message


def test_a_gradient_that_the_model_made_bad_is_not_said_to_have_come_in() -> None:
    model = Net(in_python, lambda x: (x.abs() * 0).sqrt())
    assert said(model, torch.sum).startswith("backward of sqrt made inf")
