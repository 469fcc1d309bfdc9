"""Fixes that were run come before those that failed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxguard.findings import Fix, Origin
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.one_operation import OneOperation
from fxguard.patch.fix_trials import tried_first
from fxguard.records import Frame, Row
from fxguard.report.report import Report

BAD = Fix("advice", "add nothing", ("log(a) -> log(a + 0.0)",))
GOOD = Fix("advice", "add an eps", ("log(a) -> log(a + 1e-6)",))
WITHOUT = Fix("advice", "look elsewhere")


def report(*fixes: Fix) -> Report:
    row = Row("output", 0.0, math.inf)
    origin = Origin(Frame("", "log", True, (row,)), "inf", "log", "output", fixes=fixes)
    return Report(0, (origin.frame,), (origin,))


def evidence(number: float = 0.0) -> Evidence:
    zero = Operand(number, number, dtype="float32")
    return Evidence("log", "float32", (0,), -math.inf, (zero,))


def order(*fixes: Fix, of: Tensor | None = None) -> list[Fix]:
    operation = None if of is None else OneOperation("log", torch.log, (of,))
    return [*tried_first(report(*fixes), evidence(), operation).origins[0].fixes]


def test_what_failed_comes_last() -> None:
    """On the numbers of the first bad element; what cannot be run keeps its place."""
    assert order(BAD, WITHOUT, GOOD) == [WITHOUT, GOOD, BAD]
    assert order(GOOD, WITHOUT, BAD) == [GOOD, WITHOUT, BAD]
    assert order(BAD) == [BAD]


def test_all_operands_are_tried_where_they_are_known() -> None:
    """The eps repairs the zero, and not the negative number behind it."""
    bound = Fix("advice", "bound it", ("log(a) -> log(a.clamp(min=1e-6))",))
    assert order(GOOD, bound, of=torch.tensor([0.0, 2.0])) == [GOOD, bound]
    assert order(GOOD, bound, of=torch.tensor([0.0, -2.0])) == [bound, GOOD]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_that_does_not_fit_fails(dtype: torch.dtype) -> None:
    """1 / 1e-6 does not fit float16; the result of the logarithm does."""
    fine = Fix("advice", "add more", ("log(a) -> log(a + 1e-3)",))
    x = torch.zeros(2, dtype=dtype)
    first = fine if dtype is torch.float16 else GOOD
    assert order(GOOD, fine, of=x)[0] == first


def test_operands_are_left_as_they_are() -> None:
    """Their numbers, their gradients, and the random state."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    state = torch.get_rng_state()
    order(BAD, GOOD, of=x)
    assert x.grad is None
    assert x.tolist() == [0.0, 1.0]
    assert torch.equal(torch.get_rng_state(), state)
