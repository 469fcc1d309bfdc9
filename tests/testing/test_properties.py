"""fxguard under its own strategies: whatever a model is given, the guard misses nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxguard
from fxguard.measure import eager, traceable
from fxguard.testing import assert_finite, check_profile, find_overflow, like, tensors
from support import zoo

pytestmark = pytest.mark.slow_unless_campaign

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = {"allow_nan": True, "allow_infinity": True}
often = settings(max_examples=150, database=None, deadline=None)


@often
@given(st.sampled_from(FLOATS).flatmap(lambda dtype: tensors(dtype, (40, 70), **ALL)))
def test_both_ways_to_measure_agree_with_torch(x: Tensor) -> None:
    """Large tensors of all numbers and layouts: the fast way, the traceable one, and torch."""
    magnitudes = x.double().abs()
    wanted = [float(magnitudes.amin()), float(magnitudes.amax())]
    if math.isnan(wanted[1]):
        wanted = [math.nan, math.nan]
    for way in (eager, traceable):
        numbers = way.collect([way.abs_min_max(x)])
        found = traceable.decode(*numbers[0].tolist())
        assert [found.abs_min, found.abs_max] == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        squared = x * x
        return squared.exp().log1p() - squared


reports: list[fxguard.types.Report] = []
PLAIN = Model()
GUARDED = fxguard.instrument(Model(), on_detect=reports.append)


@often
@given(tensors(torch.float32, (6, 8), allow_nan=True))
def test_nothing_changes_and_nothing_is_missed(x: Tensor) -> None:
    """Outputs are the same to the bit; a report comes exactly where a bad value comes out."""
    reports.clear()
    given_ = x.clone()
    output, expected = GUARDED(x), PLAIN(given_)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x, given_, rtol=0, atol=0, equal_nan=True)
    assert bool(reports) == (not bool(output.isfinite().all()))
    if reports:
        wanted = "argument `x` of Model.forward" if bool(x.isnan().any()) else "exp"
        if wanted == "exp" and bool((x * x).isinf().any()):
            wanted = "mul"
        assert wanted in [origin.what for origin in reports[0].origins]


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.campaign), "gpt2"])
def test_healthy_transformers_hold_for_batches_like_theirs(name: str) -> None:
    """No detection in what a model is made for, whatever the ids and masks."""
    entry = zoo.ZOO[name]
    _, batch = entry.inputs(torch.float32, True)
    ignore = ["*:log"] if name == "t5" else []  # of zero, in the buckets of relative positions
    assert find_overflow(entry.model(), like(batch), max_examples=8, seed=1, ignore=ignore) is None


def test_a_profile_holds_across_machines(tmp_path: Path) -> None:
    """Other kernels, compiled code and another number of threads stay far below half a bit."""
    entry = zoo.ZOO["bert"]
    model = entry.model()
    _, batch = entry.inputs(torch.float32, True)
    file = tmp_path / "bert.txt"
    check_profile(model, batch, file, update=True)
    check_profile(torch.compile(model, backend="aot_eager"), batch, file, bits=0.1)
    torch.set_num_threads(2)
    check_profile(model, batch, file, bits=0.1)
    with torch.backends.mkldnn.flags(enabled=False):
        check_profile(model, batch, file, bits=0.1)


def test_assert_finite_gives_what_the_model_gives() -> None:
    """Output structures and gradients pass through."""
    entry = zoo.ZOO["gpt2"]
    model = entry.model(train=True)
    model.config.use_cache = False
    args, batch = entry.inputs(torch.float32, False)

    def gradients(run: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        zoo.loss_of(run()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = torch.compile(model, backend="eager")
    expected = gradients(lambda: plain(*args, **batch))
    actual = gradients(lambda: assert_finite(model, *args, **batch))
    assert len(actual) == len(expected) > 0
    assert all(map(torch.equal, actual, expected))
