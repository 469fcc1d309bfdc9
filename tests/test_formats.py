"""Number formats, against torch's own."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch

from fxguard.formats import FORMATS, Format, headroom, is_mask


@pytest.mark.parametrize("name", FORMATS)
def test_the_limits_are_those_of_torch(name: str) -> None:
    """torch.finfo gives the same numbers to the last bit, and they survive the dtype itself."""
    wanted = torch.finfo(getattr(torch, name))
    eps, smallest = FORMATS[name].eps, FORMATS[name].smallest
    assert FORMATS[name] == Format(name, wanted.max, wanted.smallest_normal, eps)
    exact = [wanted.max, wanted.smallest_normal, smallest, 1 + eps]
    held = torch.tensor(exact, dtype=torch.float64)
    assert torch.equal(held.to(getattr(torch, name)).double(), held)
    # Not finfo.eps, which is half of it for float8_e5m2fnuz.
    between = torch.tensor([1 + eps / 4, 1 + eps / 2], dtype=torch.float64)
    assert between.to(getattr(torch, name)).double().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_loses_is_zero_in_it(name: str) -> None:
    """Torch rounds it to 0, or its vector kernels flush it; what is not lost, torch keeps."""
    form, dtype = FORMATS[name], getattr(torch, name)
    kept = max(form.smallest, min(form.smallest_normal, 2.0**-126))
    assert not form.loses(0.0)
    for number in (kept, -kept, 1.0):
        assert not form.loses(number)
        assert torch.tensor(number, dtype=torch.float64).to(dtype).double() == number
    half = form.smallest / 2
    if half:  # that of float64 is no number
        assert form.loses(half)
        assert form.loses(-half)
        assert torch.tensor(half, dtype=torch.float64).to(dtype).double() == 0


def test_every_float_dtype_of_torch_is_there() -> None:
    """But those that hold scales, or two numbers in one element."""
    known = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_floating_point}
    names = {str(dtype).removeprefix("torch.") for dtype in known}
    assert names - set(FORMATS) <= {"float8_e8m0fnu", "float4_e2m1fn_x2"}
    assert set(FORMATS) <= names


def test_a_format_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["float16"].max = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_doublings_and_halvings(name: str) -> None:
    """From any magnitude so many of them lead to the limits, also where the ratio overflows."""
    limits, form = torch.finfo(getattr(torch, name)), FORMATS[name]
    for magnitude in (0.25, 1.0, 3.0):
        up, down = form.bits_below_max(magnitude), form.bits_above_min(magnitude)
        above = Fraction(limits.max) / Fraction(magnitude)
        below = Fraction(magnitude) / Fraction(limits.smallest_normal)
        for bits, ratio in ((up, above), (down, below)):
            exact = math.log2(ratio.numerator) - math.log2(ratio.denominator)  # of any integers
            assert bits == pytest.approx(exact)
        assert headroom(name, magnitude) == up


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_is_a_mask_and_has_no_headroom(name: str) -> None:
    """With the six digits that a file keeps too; half of it is an ordinary number."""
    largest = torch.finfo(getattr(torch, name)).max
    for magnitude in (largest, float(f"{largest:.6g}")):
        assert is_mask(name, magnitude)
        assert headroom(name, magnitude) == math.inf
    assert not is_mask(name, largest / 2)
    assert headroom(name, largest / 2) == pytest.approx(1.0)


def test_beyond_the_limit_headroom_is_negative() -> None:
    """As in a forecast, where numbers are those of float64: it would have to halve as often."""
    limit = torch.finfo(torch.float16).max
    assert headroom("float16", 4 * limit) == pytest.approx(-2.0)
    assert headroom("bfloat16", 4 * limit) > 0


def test_no_headroom_is_known() -> None:
    """Zeros, and dtypes without a known limit; a bad number has none left."""
    for dtype, magnitude in (("float16", 0.0), ("int64", 3.0), ("", 3.0)):
        assert headroom(dtype, magnitude) == math.inf
    for magnitude in (math.inf, math.nan):
        assert headroom("float16", magnitude) == -math.inf
