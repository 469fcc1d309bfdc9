"""Which of many tensors are not finite, and which are 0: read in C, and by torch's operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxguard.measure.finite import Finite
from fxguard.records import Severity

pytestmark = pytest.mark.usefixtures("way")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def look(*tensors: Tensor) -> tuple[dict[int, Severity], list[int], float]:
    """Positions of what is bad, of what is 0, and the largest magnitude."""
    finite: Finite[int] = Finite()
    for position, tensor in enumerate(tensors):
        finite.look_at(position, tensor)
    return dict(finite.bad()), finite.zero, finite.largest


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_tensor_is_judged_by_itself(dtype: torch.dtype) -> None:
    """In any order: a large one before, a bad one behind, one that is 0 between them."""
    good = torch.tensor([3.0, -1.0], dtype=dtype)
    inf, nan = good / 0, torch.tensor([1.0, math.nan, math.inf], dtype=dtype)
    bad, zero, _ = look(good, inf, good, torch.zeros(3, dtype=dtype), nan, good, -inf)
    assert bad == {1: Severity.INF, 4: Severity.NAN, 6: Severity.INF}
    assert zero == [3]


def test_opposite_infinities_do_not_hide_each_other() -> None:
    """Their sum is NaN; the tensor holds none."""
    assert look(torch.tensor([math.inf, -math.inf]))[0] == {0: Severity.INF}


def test_a_sum_that_overflows_is_no_infinity() -> None:
    """Each element fits, and so the tensor is finite."""
    bad, zero, largest = look(torch.full((2000,), 60000.0, dtype=torch.float16))
    assert (bad, zero) == ({}, [])
    assert largest >= 60000.0


def test_elements_that_cancel_are_not_zero() -> None:
    """Their sum is 0, and they are not."""
    bad, zero, _ = look(torch.tensor([1.0, -1.0]), torch.tensor([0.0, -0.0]))
    assert (bad, zero) == ({}, [1])


@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_pass() -> None:
    """Empty ones, those on no device, sparse ones, and weights that require a gradient."""
    weight = torch.nn.Parameter(torch.ones(2))
    sparse = torch.ones(3).to_sparse()
    assert look(torch.empty(0), torch.ones(2, device="meta"), sparse, weight)[:2] == ({}, [])
    assert look((torch.ones(3) / 0).to_sparse())[0] == {0: Severity.INF}
