"""Matrix products in float8, a scale for each tensor: ml_dtypes is the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxguard
from fxguard.errors import FxguardError
from fxguard.forecasting._examined import Examined
from fxguard.forecasting._in_float8 import cast_to_float8
from fxguard.in_dtype.trials import FLOAT8
from support.masks import Function

E4M3, E5M2 = FLOAT8

QUICKLY = settings(max_examples=15, deadline=None, database=None)

torch.manual_seed(0)
X, W = torch.randn(8, 16), torch.randn(16, 16)


def with_outlier(x: Tensor, factor: float) -> Tensor:
    """One element so large that most others are nothing beside it."""
    x = x.clone()
    x.view(-1)[0] = factor
    return x


def oracle(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The same cast by ml_dtypes."""
    name = str(dtype).removeprefix("torch.")
    scale = float(ml_dtypes.finfo(getattr(ml_dtypes, name)).max) / np.abs(x).max()
    cast = (x * scale).astype(np.float32).astype(getattr(ml_dtypes, name))
    return np.asarray(cast.astype(np.float64) / scale)


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.sampled_from(FLOAT8),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8).filter(any),
)
def test_a_cast_is_that_of_the_oracle(dtype: torch.dtype, numbers: list[float]) -> None:
    x = np.array(numbers)
    cast = cast_to_float8(torch.tensor(numbers, dtype=torch.float64), dtype)
    assert np.array_equal(cast.numpy(), oracle(x, dtype))


def test_zeros_and_nothing_stay_what_they_are() -> None:
    assert torch.equal(cast_to_float8(torch.zeros(3), E4M3), torch.zeros(3))
    assert cast_to_float8(torch.empty(0, 4), E4M3).shape == (0, 4)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_product_that_goes_on_is_the_oracles(dtype: torch.dtype) -> None:
    """The second product reads what the first one made in float8: a rounding is inherited."""
    trials = Examined(Function(lambda x, w: (x @ w) @ w), (X, W), {}, dtype)
    trials.forecast()
    (found,) = trials.repaired
    first = oracle(oracle(X.double().numpy(), dtype) @ oracle(W.double().numpy(), dtype), dtype)
    first = first.astype(np.float32).astype(np.float64)  # between products it is float32
    second = oracle(oracle(first, dtype) @ oracle(W.double().numpy(), dtype), dtype)
    np.testing.assert_allclose(found.double().numpy(), second, rtol=1e-6)


CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], str]] = [
    ("linear", F.linear, (with_outlier(X, 1e6), W), "input[0]"),
    ("linear with a bias", F.linear, (X, with_outlier(W, 1e6), torch.full((16,), 1e9)), "input[1]"),
    ("matmul", torch.matmul, (with_outlier(X, 1e6), W), "input[0]"),
    ("bmm", torch.bmm, (X[None], with_outlier(W, 1e6)[None]), "input[1]"),
    ("addmm", torch.addmm, (torch.ones(16), X, with_outlier(W, 1e6)), "input[2]"),
    ("by name", lambda x, w: F.linear(weight=w, input=x), (with_outlier(X, 1e6), W), "input[1]"),
]


@pytest.mark.parametrize(
    ("function", "args", "operand"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_an_operand_with_an_outlier_loses_the_rest(
    function: Callable[..., Any], args: tuple[Any, ...], operand: str
) -> None:
    forecast = fxguard.forecast(Function(function), *args, dtype=E4M3)
    (row,) = forecast.rows
    assert (row.problem, row.operand, row.dtype) == ("underflow", operand, "float8_e4m3fn")
    assert f"% of the elements of {operand} become 0, the largest is " in str(row)
    x = max(args, key=lambda each: float(each.abs().max() / each.abs().median()))
    lost = (cast_to_float8(x.double(), E4M3) == 0) & (x != 0)
    assert row.share == pytest.approx(int(lost.sum()) / int((x != 0).sum()))
    assert row.needed == float(x.abs()[lost].max())


@pytest.mark.parametrize(
    ("function", "args"), [c[1:3] for c in CASES[:-1]], ids=[c[0] for c in CASES[:-1]]
)
def test_without_an_outlier_nothing_is_listed(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    plain = tuple(x.clamp(-3, 3) if isinstance(x, Tensor) else x for x in args)
    for dtype in FLOAT8:
        forecast = fxguard.forecast(Function(function), *plain, dtype=dtype)
        assert forecast, forecast
        assert str(forecast) == f"in {str(dtype)[6:]} none of 1 matrix product fails"


def test_e5m2_holds_what_e4m3_loses() -> None:
    spread = torch.exp(torch.linspace(-30, 0, 64)).view(4, 16)
    assert not fxguard.forecast(Function(torch.matmul), spread, W, dtype=E4M3)
    assert fxguard.forecast(Function(torch.matmul), spread, W, dtype=E5M2)


def test_a_product_that_cancels_is_mostly_rounding() -> None:
    x = torch.cat([X, -X * torch.linspace(0.9, 1.1, 16)], -1)
    w = torch.cat([W, W])
    (row,) = fxguard.forecast(Function(torch.matmul), x, w, dtype=E4M3).rows
    assert row.problem == "rounding"
    assert row.error > 1.5 * 2**-3
    assert math.isfinite(row.error)


def test_what_fails_does_not_spoil_what_comes_after() -> None:
    """The second product reads the first one as it is without float8."""

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).clamp(-3, 3)) @ w

    (row,) = fxguard.forecast(Function(twice), with_outlier(X, 1e6), W, dtype=E4M3).rows
    assert row.operation == "matmul"


def test_nothing_but_products_is_in_float8() -> None:
    forecast = fxguard.forecast(
        Function(lambda x: (x * 1e6 + 1e-9).softmax(-1) / 1e9), X, dtype=E4M3
    )
    assert str(forecast) == "in float8_e4m3fn none of 0 matrix products fails"


def test_the_model_stays_in_its_own_dtype() -> None:
    model = nn.Linear(16, 4).bfloat16()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    forecast = fxguard.forecast(model, X.bfloat16(), dtype=E4M3)
    assert forecast.operations == 1
    assert {row.dtype for frame in forecast.frames for row in frame.rows} == {"bfloat16"}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_gradients_are_cast_too() -> None:
    """One sample with a far larger loss than the others: their gradients are 0 beside its."""
    model = nn.Linear(16, 16)
    scales = with_outlier(torch.ones(8, 1), 1e7)

    def loss(y: Tensor) -> Tensor:
        return (y * scales).sum()

    forecast = fxguard.forecast(model, X, dtype=E4M3, loss=loss)
    (row,) = forecast.rows
    assert row.backward
    assert (row.problem, row.operand) == ("underflow", "grad of output")
    assert str(row).startswith("backward of linear")
    assert fxguard.forecast(model, X, dtype=E4M3, loss=lambda y: y.pow(2).mean())


@QUICKLY
@given(st.integers(0, 2**16), st.integers(1, 4), st.sampled_from(FLOAT8))
def test_a_healthy_model_lists_nothing(seed: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(32, 16))
    forecast = fxguard.forecast(
        model, torch.randn(16, 32), dtype=dtype, loss=lambda y: y.pow(2).mean()
    )
    assert not forecast.rows, forecast


def test_there_is_no_plan_for_float8() -> None:
    forecast = fxguard.forecast(nn.Linear(16, 4), X, dtype=E5M2)
    with pytest.raises(FxguardError, match=r"a plan is for float16 and bfloat16"):
        forecast.plan()
