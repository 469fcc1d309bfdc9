"""Tools on the device of this machine: ranges, fingerprints, forecasts, comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.measure import eager, traceable
from fxguard.measure.fingerprints import fingerprint_of
from support import zoo


class Square(nn.Module):
    """Overflows in float16 from 256 on."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x) * 1e-3


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int32, torch.int64, torch.bool, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """However a device computes them."""
    numbers = torch.tensor([[0.5, -3.0, 2.0, 0.25], [1.0, -0.5, 4.0, -8.0]])
    for tensor in (numbers, numbers.t(), numbers[:, ::2], numbers[:0], numbers[:, :1].expand(2, 9)):
        here = tensor.to(dtype) if dtype.is_complex else tensor.to(dtype).clone()
        there = here.to(device)
        assert read(eager.abs_min_max(there)) == read(traceable.abs_min_max(here))


def read(pair: Any) -> Any:
    return pair if pair is None else (float(pair[0]), float(pair[1]))


def test_fingerprints_are_those_of_the_cpu(device: torch.device) -> None:
    """Traces from two machines can be compared."""
    value = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    here, there = fingerprint_of(value), fingerprint_of(value.to(device))
    assert (here.count, here.left_out) == (there.count, there.left_out)
    assert there.norm == pytest.approx(here.norm, rel=1e-12)
    assert there.mean == pytest.approx(here.mean, rel=1e-9, abs=1e-15)


def test_a_forecast_speaks_for_the_device(device: torch.device) -> None:
    """The operation that would overflow in float16, and a run that keeps it in float32."""
    x = torch.full((4, 8), 300.0, device=device)
    found = fxguard.forecast(Square(), x, dtype=torch.float16)
    assert [(row.operation, row.problem) for row in found.rows] == [("mul", "overflow")]
    plan = found.plan()
    assert plan.verified
    assert not Square()(x.half()).isfinite().any()
    assert fxguard.keep_float32(Square(), plan)(x.half()).isfinite().all()


def test_a_model_agrees_with_itself(device: torch.device) -> None:
    """And not with one that has another weight."""
    entry = zoo.ZOO["cnn"].on(device)
    args, kwargs = entry.inputs(torch.float32, False)
    assert fxguard.compare(entry.model(), entry.model(), *args, **kwargs).agrees
    other = entry.model()
    with torch.no_grad():
        next(other.parameters()).view(-1)[0].add_(1)
    assert not fxguard.compare(entry.model(), other, *args, **kwargs).agrees
