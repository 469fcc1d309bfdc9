"""How far two forms of a result are apart."""

from __future__ import annotations

import warnings

import pytest
import torch

from fxguard.rerun.differences import are_close, relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_close_elements_are_told_from_others(dtype: torch.dtype) -> None:
    """Complex numbers by both parts, without torch's warning that one is left out."""
    low = torch.tensor([1.0, 2.0, 3.0, torch.nan], dtype=dtype)
    other = low * torch.tensor([1, 1 + 1e-7, 1.5, 1], dtype=dtype)
    if dtype.is_complex:
        other[0] += 2j
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert are_close(low, other).tolist() == [not dtype.is_complex, True, False, True]


def test_an_error_is_relative_to_the_largest_finite_number() -> None:
    """What is not finite in the reference is left out; there may be nothing else."""
    low = torch.tensor([1.0, 2.0, 3.0])
    high = torch.tensor([1.0, 2.5, torch.nan], dtype=torch.float64)
    assert relative_error(low, high) == 0.5 / 2.5
    assert relative_error(low, high, size=5.0) == 0.5 / 5.0
    assert relative_error(low, torch.zeros(3)) == 1.0
    assert relative_error(torch.tensor([torch.nan, 2.0, 3.0]), high) == torch.inf
    assert relative_error(low, torch.full((3,), torch.inf)) == 0.0
    assert relative_error(torch.tensor([1, 2]), torch.tensor([5, 7])) == 0.0
