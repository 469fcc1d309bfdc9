"""How far two forms of a result are apart."""

from __future__ import annotations

import warnings

import pytest
import torch

from fxguard.rerun.differences import are_close


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
