"""Plans of what to keep in float32: verified, and as small as they can be."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.errors import FxguardError
from support.masks import Function
from support.residual import X, residual


def test_the_plan_of_a_stream_that_does_not_fit() -> None:
    model = residual()
    plan = fxguard.forecast(model, X).plan()
    assert plan
    assert plan.operations == (
        "layers.*:linear",
        ":add",
        "norm:pow",
        "norm:mean",
        "norm:add",
        "norm:rsqrt",
        "norm:mul#1",
    )
    assert (plan.kept, plan.of) == (11, 12)
    assert plan.error < 2e-3 < plan.error_low == math.inf
    kept = fxguard.keep_float32(copy.deepcopy(model).half(), plan)
    torch.testing.assert_close(kept(X.half()).float(), model(X), rtol=2e-3, atol=2e-3)


def test_none_of_it_can_be_dropped() -> None:
    model = residual()
    plan = fxguard.forecast(model, X).plan()
    wanted = model(X)
    for glob in plan.operations:
        rest = [each for each in plan.operations if each != glob]
        found = fxguard.keep_float32(copy.deepcopy(model).half(), rest)(X.half())
        error = (found.float() - wanted).abs().max() / wanted.abs().max()
        assert not error <= 1.5 * plan.error, glob


def masked(x: Tensor) -> Tensor:
    """The mask overflows, and the softmax makes 0 of it all the same."""
    mask = torch.tensor([0.0, 0.0, torch.finfo(x.dtype).min], dtype=x.dtype)
    return (x + mask).softmax(-1)


def uses_one_minus(x: Tensor) -> Tensor:
    """The log fails, for the rounding of what is before it; it would do as it is."""
    return (1 - torch.sigmoid(x)).log()


CASES: list[tuple[Callable[[Tensor], Tensor], Tensor, tuple[str, ...]]] = [
    (masked, -torch.full((3,), 400.0), ()),
    (lambda x: x * 2, torch.ones(4), ()),
    (uses_one_minus, torch.full((4,), 12.0), (":sub", ":sigmoid")),
    (lambda x: 1 / (x * 1e-4) * 1e-9, torch.full((4,), 1e-4), (":mul", ":div")),
]


@pytest.mark.parametrize(("function", "x", "wanted"), CASES)
def test_what_has_to_be_kept(
    function: Callable[[Tensor], Tensor], x: Tensor, wanted: tuple[str, ...]
) -> None:
    plan = fxguard.forecast(Function(function), x).plan()
    assert plan.verified, plan
    assert set(plan.operations) == set(wanted), plan


def test_complex_numbers_stay_as_they_are() -> None:
    """A squared signal fits into complex64; of its loudness only the square does not fit."""

    class Loudness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, signal: Tensor) -> Tensor:
            loudness = (signal * signal.conj()).abs().sqrt().to(self.gain.dtype)
            return loudness.square().mean().sqrt() * self.gain

    signal = torch.tensor([300j, 400.0, 200 + 200j, 100j])
    plan = fxguard.forecast(Loudness(), signal).plan()
    assert plan.verified, plan
    assert plan.operations[0] == ":square", plan


def test_an_input_that_does_not_fit_cannot_be_kept() -> None:
    plan = fxguard.forecast(Function(lambda x: x / 1e3), torch.full((4,), 1e5)).plan()
    assert not plan
    assert plan.remains == ("input 0",)
    assert "float16 does not hold: input 0" in str(plan)


def test_neither_can_an_output() -> None:
    plan = fxguard.forecast(Function(lambda x: x * 1e3), torch.full((4,), 1e3)).plan()
    assert not plan
    assert "NOT verified" in str(plan)
    assert "float16 does not hold: output 0, which needs 1e+06" in str(plan)


def test_an_output_that_a_clamp_cuts_off_is_not_verified() -> None:
    plan = fxguard.forecast(
        Function(lambda x: (x * x).clamp(-65504.0, 65504.0)), torch.full((4,), 400.0)
    ).plan()
    assert not plan
    assert str(plan).startswith("nothing kept in float32 makes float16 suffice\nNOT verified")
    assert plan.remains == ("output 0, which needs 160000",)


def test_nothing_is_verified_where_no_output_can_be_compared() -> None:
    plan = fxguard.forecast(Function(lambda x: (x * 2).argmax()), torch.ones(4)).plan()
    assert not plan
    assert "error of the outputs: not known" in str(plan)


class Activation(nn.Module):
    """Forward is well: the tanh of inf is 1. Backward multiplies 0 with inf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.tanh(x.exp()).mean()


def test_gradients_are_a_reason_too() -> None:
    torch.manual_seed(0)
    model, x = Activation(), torch.full((2, 4), 100.0)
    assert fxguard.forecast(model, x).plan().operations == ()
    plan = fxguard.forecast(model, x, loss=lambda loss: loss).plan()
    assert ":exp" in plan.operations
    assert math.isfinite(plan.gradient_error)
    kept = fxguard.keep_float32(copy.deepcopy(model).half(), plan)
    kept(x.half()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in kept.parameters())


def test_what_it_prints_and_exports() -> None:
    plan = fxguard.forecast(residual(), X).plan()
    text = str(plan)
    assert text.startswith("keep 11 of 12 operations in float32, the rest in float16\n  layers.*:")
    assert "verified with model.to(torch.float16)" in text
    assert 'fxguard.keep_float32(model, [\n    "layers.*:linear",' in plan.advice
    assert json.loads(plan.to_json())["operations"][0] == "layers.*:linear"


def test_a_plan_with_nothing_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 2)
    plan = fxguard.forecast(model, torch.ones(1, 2)).plan()
    assert str(plan).startswith("nothing has to be kept in float32: float16 suffices")
    assert "forward" not in fxguard.keep_float32(model, plan).__dict__


def test_the_model_and_its_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    x, state = torch.randn(4, 8) * 1e4, torch.get_rng_state()
    plan = fxguard.forecast(model, x, loss=lambda y: y.sum()).plan()
    assert plan.draws
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forecast_from_elsewhere_has_no_plan() -> None:
    with pytest.raises(FxguardError, match="holds no model"):
        fxguard.types.Forecast("float16", (), 0).plan()


def test_a_plan_for_autocast_is_tried_under_autocast() -> None:
    """Weights stay in float32, and norms compute there: products alone have to be kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[1].weight *= 1e6
        model[2].weight /= 1e6
    x = torch.randn(4, 8)
    plan = fxguard.forecast(model, x).plan(autocast=True)
    assert plan.mix == "torch.autocast('cpu', torch.float16)"
    assert plan, plan
    assert plan.operations == ("1:linear", "2:linear")
    wanted = model(x)
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
        kept = fxguard.keep_float32(copy.deepcopy(model), plan)(x)
    assert kept.dtype is torch.float16  # as without the plan
    torch.testing.assert_close(kept.float(), wanted, rtol=1e-3, atol=1e-3)


def test_a_model_that_autocast_runs_well_has_nothing_to_keep() -> None:
    """Its square overflows in float16, and autocast computes it in float32."""

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    forecast = fxguard.forecast(Function(norm), torch.full((2, 4), 400.0))
    assert forecast.plan().operations
    plan = forecast.plan(autocast=True)
    assert plan
    assert plan.operations == ()
    assert plan.advice == "torch.autocast('cpu', torch.float16)"
