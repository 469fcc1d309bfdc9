"""The operation inside a composite one that failed first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxguard.graph.evidence import Evidence
from fxguard.graph.inside import evidence_inside
from fxguard.graph.operations import read_call
from fxguard.graph.wide_form import Ran

HALF = torch.float16


def inside(function: Callable[..., Any], *args: Tensor) -> Evidence | None:
    return evidence_inside(Ran(read_call(function, args, {}), function, function, args, {}, None))


def test_the_first_that_fails_is_found_with_what_it_read() -> None:
    """``x / max(norm, 1e-12)``: the bound is 0 in float16."""
    found = inside(functional.normalize, torch.zeros(2, 4, dtype=HALF))
    assert found is not None
    assert found.kind == "div"
    assert math.isnan(found.number)
    assert [(x.low, x.wide_low) for x in found.operands] == [(0.0, 0.0), (0.0, 1e-12)]
    assert math.isnan(found.same or 0.0)
    assert found.wide == 0.0


def test_it_is_computed_in_float64_too() -> None:
    x = torch.full((2, 4), 6e4, dtype=HALF)
    found = inside(functional.pairwise_distance, x, -x)
    assert found is not None
    assert (found.kind, found.number, found.same) == ("sub", math.inf, 120000.0)


@pytest.mark.parametrize("function", [torch.exp, torch.std], ids=lambda f: f.__name__)
def test_one_kernel_has_no_inside(function: Callable[..., Any]) -> None:
    assert inside(function, torch.full((2, 4), 6e4, dtype=HALF)) is None


def test_what_is_healthy_has_no_failure_inside() -> None:
    assert inside(functional.normalize, torch.ones(2, 4)) is None
