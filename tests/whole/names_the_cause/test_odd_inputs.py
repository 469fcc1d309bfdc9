"""Odd tensors that are bad when the model is given them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxguard
from support.odd_tensors import QUIET, SMALL, Model
from support.subclasses import (
    Tagged,
    Wrapper,
)
from support.ways import EAGER, PYTHON, assert_same_bits, the_way

pytestmark = QUIET


def doubled(x: Tensor) -> Tensor:
    return x * 2


def increased(x: Tensor) -> Tensor:
    return x + 1


def widened(x: Tensor) -> Tensor:
    return x.float() * 2


def dense_doubled(x: Tensor) -> Tensor:
    return x.to_dense() * 2


PLUS = SMALL.clone()
PLUS[0, 0] = math.inf
MINUS = SMALL.clone()
MINUS[0, 0] = -math.inf

BAD_INPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "float8_e5m2": (lambda x: x.to(torch.float8_e5m2), widened),
    "float64": (Tensor.double, doubled),
    "complex64": (lambda x: x.to(torch.complex64), increased),
    "coo": (Tensor.to_sparse, dense_doubled),
    "csr": (Tensor.to_sparse_csr, dense_doubled),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
        doubled,
    ),
    "function subclass": (lambda x: x.as_subclass(Tagged), doubled),
    "wrapper": (Wrapper, doubled),
}


@pytest.mark.parametrize("way", [PYTHON, EAGER])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_an_odd_input_that_is_bad_is_blamed_itself(name: str, way: str) -> None:
    """An infinite input is the cause; one with -inf alone is a mask, and no report."""
    make, function = BAD_INPUTS[name]
    reports: list[fxguard.types.Report] = []
    with the_way(way):
        model = fxguard.instrument(Model(function), on_detect=reports.append)
        for x in (SMALL, MINUS, PLUS):
            assert_same_bits(model(make(x)), function(make(x)))
    assert [report.batch_number for report in reports] == [2]
    assert reports[0].origins[0].what.startswith(("argument `", "input["))
    assert reports[0].origins[0].posinf_count == 1
