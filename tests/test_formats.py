"""Number formats, against torch's own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxguard.formats import FORMATS, Format


@pytest.mark.parametrize("name", FORMATS)
def test_the_limits_are_those_of_torch(name: str) -> None:
    """torch.finfo gives the same numbers to the last bit, and they survive the dtype itself."""
    wanted = torch.finfo(getattr(torch, name))
    assert FORMATS[name] == Format(name, wanted.max, wanted.smallest_normal)
    held = torch.tensor([wanted.max, wanted.smallest_normal], dtype=torch.float64)
    assert torch.equal(held.to(getattr(torch, name)).double(), held)


def test_every_float_dtype_of_torch_is_there() -> None:
    """But those that hold scales, or two numbers in one element."""
    known = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_floating_point}
    names = {str(dtype).removeprefix("torch.") for dtype in known}
    assert names - set(FORMATS) <= {"float8_e8m0fnu", "float4_e2m1fn_x2"}
    assert set(FORMATS) <= names


def test_a_format_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["float16"].max = 0.0  # type: ignore[misc]
