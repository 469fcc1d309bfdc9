"""An addend or a factor that is lost, all of it, is a rounding of the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxguard
from support.masks import Function

ONES = torch.ones(4)
SMALL = ONES * 1e-3
LAST = torch.tensor([0.0, 0, 0, 1])
MINUS = torch.finfo(torch.float16).min

# What they are called, the function, its arguments, which operand is lost, and the same without it.
LOST: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], str, Callable[..., Any]]] = [
    ("an addend", torch.add, (ONES, SMALL), "input[1]", lambda x, _: x),
    ("in front", torch.add, (SMALL, ONES), "input[0]", lambda _, y: y),
    ("what is subtracted", torch.sub, (ONES, SMALL), "input[1]", lambda x, _: x),
    ("what is subtracted from", torch.sub, (SMALL, ONES), "input[0]", lambda _, y: -y),
    ("beside a number", lambda x: (x + 1000) - 1000, (ONES / 2,), "input[0]", torch.zeros_like),
    ("a factor", lambda x: x * 0.999, (ONES,), "0.999", torch.clone),
    ("a divisor", lambda x: x / 0.999, (ONES,), "0.999", torch.clone),
    ("where it is no zero", torch.add, (ONES, SMALL * LAST), "input[1]", lambda x, _: x),
    ("a row for each", torch.add, (ONES.expand(3, 4), SMALL), "input[1]", lambda x, _: x),
]

COUNTS: list[tuple[str, Callable[..., Any], tuple[Tensor, ...]]] = [
    ("part of it counts", lambda x, y: x + y, (ONES, torch.tensor([1e-3, 1e-3, 1e-3, 1e-2]))),
    ("an eps", lambda x: x + 1e-6, (ONES,)),
    ("a factor of 1", lambda x: x * 1.0, (ONES,)),
    ("a factor of ones", lambda x, y: x * y, (ONES * 3, ONES)),
    ("zeros", lambda x, y: x + y, (ONES, torch.zeros(4))),
    ("zeros times something", lambda x: x * 0.5, (torch.zeros(4),)),
    ("lost in float32, too", lambda x, y: x + y, (ONES, SMALL * 1e-9)),
    ("a mask", lambda x, m: x + m, (ONES, torch.tensor([0, MINUS, MINUS, 0]))),
    ("one over something", lambda x: 1 / x, (ONES * 0.999,)),
]


@pytest.mark.parametrize(
    ("function", "args", "operand", "without"), [c[1:] for c in LOST], ids=[c[0] for c in LOST]
)
def test_what_is_lost_is_listed(
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    operand: str,
    without: Callable[..., Any],
) -> None:
    rows = fxguard.forecast(Function(function), *args, dtype=torch.bfloat16).rows
    assert [(row.problem, row.operand) for row in rows] == [("rounding", operand)]
    low = [x.bfloat16() for x in args]
    assert torch.equal(function(*low), without(*low))


@pytest.mark.parametrize(("function", "args"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_what_counts_is_not(function: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    forecast = fxguard.forecast(Function(function), *args, dtype=torch.bfloat16)
    assert forecast, forecast


def test_the_row_says_what_is_lost() -> None:
    (row,) = fxguard.forecast(Function(torch.add), ONES, SMALL, dtype=torch.bfloat16).rows
    assert str(row).endswith("rounding, all of input[1], up to 0.001, is lost in the other operand")
    assert row.needed == float(SMALL.bfloat16()[0])
