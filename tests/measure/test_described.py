"""A tensor of data in four numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxguard.measure import native

pytestmark = pytest.mark.skipif(not native.is_built, reason="needs the part in C")


def wanted(x: Tensor) -> tuple[float, float, float, float]:
    """The same by torch, in float64."""
    every = -(-x.numel() // 8192)
    sample = x.reshape(-1)[::every]
    numbers = sample.double()
    others = numbers[numbers != 0].abs()
    if x.is_floating_point():
        last = float(others.log2().mean().exp2()) if len(others) else 1.0
    else:
        last = float(len(sample.unique()))
    largest, mean = float(x.double().abs().max()), float(numbers.mean())
    return largest, mean, 1 - len(others) / len(numbers), last


@pytest.mark.parametrize(
    "make",
    {
        "normal": lambda: torch.randn(300, 300),
        "one": lambda: torch.randn(()),
        "float16": lambda: torch.randn(17).half(),
        "bfloat16": lambda: torch.randn(100, 100).bfloat16(),
        "float64": lambda: torch.randn(1000).double() * 1e200,
        "small": lambda: torch.randn(1000) * 1e-30,
        "subnormal": lambda: torch.randn(1000).double() * 1e-310,
        "relu": lambda: torch.randn(50, 50).relu(),
        "zeros": lambda: torch.zeros(9),
        "infinite": lambda: torch.tensor([1.0, -math.inf]),
        "nan": lambda: torch.tensor([1.0, math.nan]),
        "every second": lambda: torch.randn(64)[::2],
        "transposed": lambda: torch.randn(5, 4).t(),
        "tokens": lambda: torch.randint(0, 50257, (64, 1024)),
        "negative": lambda: torch.randint(-9, 9, (100,)),
        "apart": lambda: torch.arange(8192) * 2**40,
        "alike": lambda: torch.full((8192,), -3),
        "int32": lambda: torch.randint(0, 9, (100,), dtype=torch.int32),
        "int16": lambda: torch.randint(-9, 9, (100,), dtype=torch.int16),
        "int8": lambda: torch.randint(-128, 128, (100,), dtype=torch.int8),
        "pixels": lambda: torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8),
        "mask": lambda: torch.rand(100) > 0.3,
    }.items(),
    ids=lambda case: case[0],
)
def test_described(make: tuple[str, object]) -> None:
    """As torch describes it."""
    _, made = make
    x = made()  # type: ignore[operator]
    assert native.described(x) == pytest.approx(wanted(x), rel=1e-6, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3).expand(4, 3),
        torch.randn(4, 4)[:, :2],
        torch.randn(0),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(3).to(torch.uint16),
        torch.randn(3, 3).to_sparse(),
        torch.empty(3, device="meta"),
        "a tensor",
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype} {x.layout} {list(x.shape)} {x.device}",
)
def test_what_cannot_be_read(x: Tensor) -> None:
    assert native.described(x) is None
