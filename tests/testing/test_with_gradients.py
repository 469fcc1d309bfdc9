"""Assertions that look at gradients too: ``gradients=True``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.report.errors import NumericsError
from fxguard.testing import assert_finite, find_overflow, tensors


def length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


class Net(nn.Module):
    """Its weights have a bad gradient where its input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        hidden = length(self.fc(x) * scale)
        return SimpleNamespace(loss=hidden.mean(), hidden=hidden * torch.nan_to_num(hidden / 0))


def test_a_gradient_of_what_a_function_is_given() -> None:
    """Healthy in forward; only with gradients it is not."""
    zeros = torch.zeros(2, 4)
    assert torch.equal(assert_finite(length, zeros), zeros[:, 0])
    with pytest.raises(NumericsError, match="backward of sqrt made inf") as raised:
        assert_finite(length, zeros, gradients=True)
    assert raised.value.report.phase == "backward"
    assert not zeros.requires_grad
    assert_finite(length, torch.ones(2, 4), gradients=True)


def test_a_gradient_of_the_loss_that_a_model_returns() -> None:
    """Of weights; none is accumulated, and no hook is left."""
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(2, 4)
    assert_finite(model, x, strict=False, ignore=["*:truediv", "*:div"], gradients=True)
    with pytest.raises(NumericsError, match="backward of sqrt made inf"):
        assert_finite(model, torch.zeros(2, 4), strict=False, ignore=["*:div"], gradients=True)
    assert model.fc.weight.grad is None
    assert model.fc.weight._backward_hooks is None
    with torch.no_grad(), pytest.raises(NumericsError):  # gradients are asked for
        assert_finite(model, x * 0, strict=False, ignore=["*:div"], gradients=True)


def test_a_model_that_is_instrumented_is_asked_itself() -> None:
    """By its own guard, which looks at gradients by its own options."""
    model = fxguard.instrument(nn.Sequential(nn.Linear(4, 4)), on_detect=lambda report: None)
    assert_finite(model, torch.randn(2, 4), gradients=True)
    assert fxguard.guard_of(model).batch_number == 1


def test_integers_and_evaluation_have_no_gradients() -> None:
    """Nothing to differentiate is no failure."""
    ids = torch.arange(4)
    assert_finite(lambda x: x * 2, ids, gradients=True)
    frozen = nn.Embedding(4, 3).requires_grad_(False)
    assert assert_finite(frozen, ids, gradients=True).shape == (4, 3)


def test_the_search_finds_and_shrinks_what_spoils_a_gradient() -> None:
    """The gradient of a reciprocal overflows float16 before the reciprocal does."""

    def reciprocal(x: Tensor) -> Tensor:
        return 1 / x

    drawn = tensors(torch.float16, (2,), min_value=1e-3, max_value=1)
    assert find_overflow(reciprocal, drawn, seed=1, max_examples=60) is None
    found = find_overflow(reciprocal, drawn, seed=1, max_examples=60, gradients=True)
    assert found is not None
    assert found.report.origins[0].message.startswith("backward of ")
    assert found.report.origins[0].cause == "overflow"
