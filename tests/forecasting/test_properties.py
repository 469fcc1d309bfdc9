"""What holds of forecasts and plans, whatever the model and the batch; ml_dtypes is the oracle."""

from __future__ import annotations

import copy
import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxguard
from fxguard.forecasting._failure import failure_of
from fxguard.formats import FORMATS
from support.masks import Function
from support.residual import X, residual

pytestmark = pytest.mark.slow

QUICKLY = settings(max_examples=15, deadline=None, database=None)

ORACLE = {
    "float16": np.float16,
    **{name: getattr(ml_dtypes, name) for name in FORMATS if hasattr(ml_dtypes, name)},
}


def test_every_narrow_format_has_an_oracle() -> None:
    assert FORMATS.keys() - ORACLE.keys() == {"float32", "float64"}


@pytest.mark.parametrize("name", ORACLE)
def test_formats_are_those_of_the_oracle(name: str) -> None:
    info, ours = ml_dtypes.finfo(ORACLE[name]), FORMATS[name]
    assert ours.max == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.eps == float(info.eps)


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.sampled_from(["float16", "bfloat16"]),
    st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
)
def test_a_cast_fails_where_the_oracle_says_so(name: str, numbers: list[float]) -> None:
    """An infinity is an overflow; half of the numbers that are not 0 becoming 0, an underflow."""
    wide = torch.tensor(numbers, dtype=torch.float64)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.array(numbers).astype(np.float32).astype(ORACLE[name]).astype(np.float64)
    low = wide.float().to(getattr(torch, name))
    assert np.array_equal(low.double().numpy(), rounded)
    lost = sum(n != 0 and r == 0 for n, r in zip(numbers, rounded, strict=True))
    wanted = None
    if not np.isfinite(rounded).all():
        wanted = "overflow"
    elif lost and lost >= 0.5 * sum(n != 0 for n in numbers):
        wanted = "underflow"
    failure = failure_of(low, wide)
    assert (None if failure is None else failure.problem) == wanted


@QUICKLY
@given(st.integers(0, 2**16), st.integers(1, 4), st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_model_that_fits_lists_nothing(seed: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    forecast = fxguard.forecast(
        model, torch.randn(8, 16), dtype=dtype, loss=lambda y: y.float().pow(2).mean() * 2.0**10
    )
    assert not forecast.rows, forecast


@functools.cache
def plan_of_residual() -> fxguard.types.PrecisionPlan:
    return fxguard.forecast(residual(), X).plan()


@QUICKLY
@given(st.integers(0, 2**16), st.integers(1, 6))
def test_a_plan_holds_on_batches_of_like_range(seed: int, rows: int) -> None:
    plan = plan_of_residual()
    assert plan.verified
    draw = torch.Generator().manual_seed(seed)
    x = (torch.rand(rows, 8, generator=draw) * 2 - 1) * 4e4
    model = residual()
    wanted = model(x.half().float())
    found = fxguard.keep_float32(copy.deepcopy(model).half(), plan)(x.half())
    assert found.isfinite().all()
    assert (found.float() - wanted).abs().max() <= 5e-3 * wanted.abs().max()


@QUICKLY
@given(st.floats(6, 20), st.floats(6, 20), st.integers(0, 2**16))
def test_a_plan_is_verified_or_says_what_does_not_fit(up: float, down: float, seed: int) -> None:
    """Whatever a product needs, a plan mends it, unless it is the output that needs it."""
    x = torch.rand(4, generator=torch.Generator().manual_seed(seed)) + 1
    product = Function(lambda x: (x * 2.0**up) * (x / 4 * 2.0**up) / 2.0**down)
    plan = fxguard.forecast(product, x).plan()
    largest = float((x.double() * x.double() / 4).max()) * 2.0 ** (2 * up - down)
    if largest > 65519:
        assert not plan.verified
        assert any(each.startswith("output 0, which needs") for each in plan.remains)
    elif up < 15 and largest > 2**-10:  # the factors are numbers that float16 holds
        assert plan.verified, plan
        assert math.isfinite(plan.error)
