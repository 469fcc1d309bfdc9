"""What verified means: there is a reference, and outputs and gradients are near the best."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.masks import Function

BFLOAT16 = torch.bfloat16


class OnLinear(nn.Module):
    """A function of a linear layer and its input."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


class Positions(nn.Module):
    """The sine of a position times a frequency."""

    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.tensor([frequency]))

    def forward(self, places: Tensor) -> Tensor:
        return (places.to(self.frequency.dtype) * self.frequency).sin()


def far_from_zero(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x) + 1000
    return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()


def cancelled(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x) + 30
    return y.pow(2).mean(-1) - y.mean(-1).pow(2)


def x_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Every operation is within its roundings, and the output has no right digit.
AMPLIFIES: list[tuple[nn.Module, Tensor, torch.dtype]] = [
    (Positions(1.0), torch.arange(600), BFLOAT16),
    (Positions(0.5), torch.arange(4000), torch.float16),
    (OnLinear(cancelled), x_of(8, 16), torch.float16),
    (OnLinear(far_from_zero), x_of(4, 16), BFLOAT16),
    (Function(lambda x: x.cumsum(-1).cos()), torch.ones(1, 3000), BFLOAT16),
]


@pytest.mark.parametrize(("model", "x", "dtype"), AMPLIFIES)
def test_digits_that_are_lost_where_nothing_fails(
    model: nn.Module, x: Tensor, dtype: torch.dtype
) -> None:
    """The plan keeps what loses them, and comes near the model in float64."""
    plan = fxguard.forecast(model, x, dtype=dtype).plan()
    assert plan.verified, plan
    assert plan.error_low > 0.3 > 0.03 > plan.error
    given = x.to(dtype) if x.is_floating_point() else x
    kept = fxguard.keep_float32(copy.deepcopy(model).to(dtype), plan)(given).double()
    wanted = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x)
    assert (kept - wanted).norm() < 4 * torch.finfo(dtype).eps * wanted.norm()


def test_the_twin_needs_nothing() -> None:
    """Few positions, all of which bfloat16 holds."""
    plan = fxguard.forecast(Positions(0.125), torch.arange(16), dtype=BFLOAT16).plan()
    assert plan.verified, plan
    assert plan.operations == ()


def test_only_what_loses_digits_is_kept() -> None:
    """The division that follows may stay in bfloat16."""
    model = OnLinear(far_from_zero)
    plan = fxguard.forecast(model, x_of(4, 16), dtype=BFLOAT16).plan()
    assert {":sub", ":mean"} <= set(plan.operations)
    assert not {":div", ":sqrt"} & set(plan.operations)


def test_what_inputs_lose_is_said() -> None:
    """A thousand radians in bfloat16 are wrong before the model begins."""
    x = torch.linspace(0, 1000, 64)
    plan = fxguard.forecast(Function(lambda x: (x * 1.0).sin()), x, dtype=BFLOAT16).plan()
    assert not plan.verified
    (missing,) = plan.missing
    assert "with every operation in float32: roundings of weights and inputs" in missing
    assert f"missing: {missing}" in str(plan)


def test_a_tolerance_is_the_users() -> None:
    """A healthy layer is within four units of roundoff, and not within a tenth of one."""
    torch.manual_seed(0)
    forecast = fxguard.forecast(nn.Linear(8, 8), torch.randn(4, 8), dtype=BFLOAT16)
    assert forecast.plan().verified
    strict = forecast.plan(output_tolerance=4e-4)
    assert not strict.verified
    assert "0.0004 is allowed" in strict.missing[0]


UNHEALTHY: list[tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = [
    (lambda linear, x: (linear(x) * 1e25).square().square(), "made inf"),
    (lambda linear, x: linear(x).relu().log(), "log made -inf"),
    (lambda linear, x: (linear(x) - 100).sqrt(), "sqrt made NaN"),
]


@pytest.mark.parametrize(("function", "why"), UNHEALTHY)
def test_nothing_is_verified_against_a_model_that_fails_itself(
    function: Callable[[nn.Linear, Tensor], Tensor], why: str
) -> None:
    """In float32: there is nothing to compare with, and the operation is named."""
    plan = fxguard.forecast(OnLinear(function), x_of(8, 16)).plan()
    assert not plan.verified
    assert plan.operations == ()
    assert plan.missing[0].startswith("nothing to compare with: in float32 too: ")
    assert why in plan.missing[0]


def test_a_mask_that_is_returned_is_no_failure() -> None:
    """Its infinities are meant, and are the same in float16."""
    mask = torch.eye(16).bool()
    model = OnLinear(lambda linear, x: linear(x).masked_fill(mask, -math.inf))
    plan = fxguard.forecast(model, x_of(16, 16)).plan()
    assert plan.verified, plan


def test_a_gradient_that_is_nan_in_float32_verifies_nothing() -> None:
    """The forward is healthy in both."""
    model = OnLinear(lambda linear, x: (linear(x) * 0).square().sum().sqrt())
    plan = fxguard.forecast(model, x_of(4, 16), loss=lambda y: y).plan()
    assert not plan.verified
    assert "in float32 too, the gradient of linear.bias is not finite" in str(plan)


def test_choices_of_the_copy_are_not_those_of_the_model() -> None:
    """What bfloat16 chose otherwise is wrong, though all that follows is exact."""
    table = x_of(16, 8)
    model = OnLinear(lambda linear, x: table.to(x.dtype)[linear(x).argmax(-1)])
    x = x_of(2048, 16)
    low = copy.deepcopy(model).bfloat16()
    chosen = low.linear(x.bfloat16()).argmax(-1) != model.linear(x).argmax(-1)
    assert bool(chosen.any())
    plan = fxguard.forecast(model, x, dtype=BFLOAT16).plan()
    assert plan.error > 0.1
    assert not plan.verified


def dies(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y.float().square().mean() * factor


def test_gradients_that_the_dtype_makes_zero_are_missing() -> None:
    """A loss scale is said, and lifts them; bfloat16 holds them."""
    torch.manual_seed(0)
    model, x, loss = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), dies(1e-9)
    low = copy.deepcopy(model).half()
    loss(low(x.half())).backward()
    assert not any(bool(p.grad.any()) for p in low.parameters() if p.grad is not None)
    plan = fxguard.forecast(model, x, loss=loss).plan()
    assert not plan.verified
    assert "and of 3 more is 0 in float16: scale the loss by 2**" in plan.missing[0]
    scale = float(2 ** int(plan.missing[0].split("2**")[1].split()[0]))
    low.zero_grad()
    (loss(low(x.half())) * scale).backward()
    assert all(bool(p.grad.any()) for p in low.parameters() if p.grad is not None)
    assert fxguard.forecast(model, x, loss=loss, dtype=BFLOAT16).plan().verified
    assert fxguard.forecast(model, x, loss=dies(1.0)).plan().verified


def test_gradients_that_are_rightly_zero_are_not() -> None:
    """A relu that lets nothing through; and the bias before a batch norm, in rounding alone."""
    torch.manual_seed(0)
    dead = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.no_grad():
        dead[0].bias -= 100
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    for model in (dead, normed):
        for dtype in (torch.float16, BFLOAT16):
            forecast = fxguard.forecast(model, x_of(16, 8), dtype=dtype, loss=dies(1.0))
            plan = forecast.plan()
            assert plan.verified, plan
            assert plan.operations == ()


def test_a_deep_healthy_model_is_verified() -> None:
    """Roundings of its layers are within the tolerance, gradients too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for dtype in (torch.float16, BFLOAT16):
        plan = fxguard.forecast(model, x_of(2, 9, 16), dtype=dtype, loss=dies(1.0)).plan()
        assert plan.verified, plan
        assert plan.operations == ()
