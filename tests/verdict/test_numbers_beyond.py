"""Numbers of the program that a dtype cannot hold: which number, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.formats import FORMATS

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


class Does(nn.Module):
    """A model whose forward is one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def report_of(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> fxguard.types.Report | None:
    """The report on a function of two numbers; None if it is healthy."""
    model = fxguard.instrument(Does(function))
    try:
        model(torch.tensor([0.3, 2.0], dtype=dtype))
    except fxguard.NonFiniteError as error:
        return error.report
    return None


@pytest.mark.parametrize(
    ("function", "dtype", "number"),
    [
        (lambda x: x * 1e39, FLOAT, "1e+39"),
        (lambda x: 1e39 * x, BRAIN, "1e+39"),
        (lambda x: x.clone().mul_(-1e39), HALF, "-1e+39"),
        (lambda x: x + 1e39, FLOAT, "1e+39"),
        (lambda x: x - 1e5, HALF, "100000"),
        (lambda x: x + 70000, HALF, "70000"),
        (lambda x: 1e39 - x, FLOAT, "1e+39"),
        (lambda x: 1e39 / x, FLOAT, "1e+39"),
        (lambda x: x**1e39, FLOAT, "1e+39"),
        (lambda x: 1e39**x, FLOAT, "1e+39"),
        (lambda x: torch.where(x > 1, x, -1e9), HALF, "-1e+09"),
        (lambda x: torch.tensor(1e39) + x, FLOAT, "1e+39"),
        (lambda x: torch.tensor([1.0, 1e5], dtype=HALF) + x, HALF, "100000"),
    ],
)
def test_a_number_that_does_not_fit_is_named(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, number: str
) -> None:
    """With the dtype and its largest number; rounding is not said, and float64 is not accused."""
    report = report_of(function, dtype)
    assert report is not None
    origin, name = report.origins[0], str(dtype).removeprefix("torch.")
    assert math.isinf(torch.tensor(float(number)).to(dtype).item())
    largest = f"{torch.finfo(dtype).max:.6g}"
    words = f"{number} does not fit {name}: the largest number is {largest}"
    assert (origin.cause, origin.cause_in_words) == ("overflow", words)
    assert report.verdict[0].endswith(words)
    text = "\n".join(report.verdict)
    assert "rounding" not in text
    assert "infinite in float64" not in text or "**" in text
    assert "holds" in report.fix or "finfo" in report.fix


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x * 3e38, FLOAT),  # the product does not fit
        (lambda x: x * 1e5, HALF),  # float32 computes it: 0.3 * 1e5 is fine
        (lambda x: x * 65519, HALF),  # rounds to the largest number
        (lambda x: x * 65504 + x, HALF),
        (lambda x: (x * 2e38) * 1e5, FLOAT),
        (lambda x: torch.exp(x * 1000), FLOAT),
    ],
)
def test_a_product_that_does_not_fit_is_an_overflow(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The number of the program is in order: what it was multiplied with is too large for it."""
    report = report_of(function, dtype)
    assert report is not None
    assert (report.origins[0].cause, report.origins[0].cause_in_words) == ("overflow", "")


@pytest.mark.parametrize("number", [65519.0, 65520.0, -65520.0, 1e39])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_what_overflows_is_what_torch_makes_infinite(name: str, number: float) -> None:
    """Half a unit above the largest number is the first that does."""
    dtype = getattr(torch, name)
    made = torch.tensor(number, dtype=torch.float64).to(dtype)
    assert FORMATS[name].overflows(number) is bool(made.isinf())
    assert not FORMATS[name].overflows(math.inf)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.normalize(x * 0, dim=0, eps=1e-8),
        lambda x: x / (x * 0 + 1e-8),
        lambda x: x / (x * 0).clamp(min=1e-8),
    ],
)
def test_an_eps_that_is_0_is_named(function: Callable[[Tensor], Tensor]) -> None:
    """1e-8 is 0 in float16, and not in float32."""
    report = report_of(function, HALF)
    assert report is not None
    assert report.origins[0].cause_in_words == "underflow: 1e-08 is 0 in float16"
    assert report_of(function, FLOAT) is None
