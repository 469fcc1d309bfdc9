"""What magnitudes alone leave no doubt about."""

from __future__ import annotations

import math

import pytest

from fxguard.advice.causes import cause_of
from fxguard.advice.deduced import deduced
from fxguard.advice.words import words_for

KNOWN = [
    ("div", True, [(0.0, 3.0), (0.0, 2.0)], "0 / 0"),
    ("div", False, [(1.0, 3.0), (0.0, 2.0)], "division by zero"),
    ("log", False, [(0.0, 2.0)], "log of zero"),
    ("log1p", False, [(0.5, 2.0)], "log of zero"),
    ("rsqrt", False, [(0.0, 2.0)], "division by the root of zero"),
]

UNKNOWN = {
    "no zero to divide": ("div", True, [(1.0, 3.0), (0.0, 2.0)]),
    "an overflow": ("div", False, [(1.0, 3e38), (1e-3, 2.0)]),
    "NaN of an infinity": ("div", True, [(0.0, math.inf), (0.0, 2.0)]),
    "a number and a tensor": ("div", True, [(0.0, 2.0)]),
    "a negative number": ("log", True, [(0.0, 2.0)]),
    "magnitudes on one side": ("log1p", False, [(1.5, 2.0)]),
    "nothing": ("div", True, []),
    "another operation": ("matmul", True, [(0.0, 1.0), (0.0, 1.0)]),
}


@pytest.mark.parametrize(("kind", "is_nan", "read", "words"), KNOWN)
def test_the_only_possibility(
    kind: str, is_nan: bool, read: list[tuple[float, float]], words: str
) -> None:
    found = deduced(kind, "float32", is_nan=is_nan, read=read)
    assert found is not None
    assert cause_of(found) == "zero divisor"
    assert words_for("zero divisor", found) == words


@pytest.mark.parametrize("kind", ["matmul", "linear", "mul", "add", "sum", "square"])
def test_a_product_that_is_too_large(kind: str) -> None:
    """Finite numbers add and multiply to infinities only where the dtype ends."""
    read = [(0.0, 2e31), (1e-3, 8e29)][: 1 if kind in ("sum", "square") else 2]
    found = deduced(kind, "float32", is_nan=False, read=read)
    assert found is not None
    assert cause_of(found) == "overflow"
    assert deduced(kind, "float32", is_nan=True, read=read) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_more_than_one(name: str) -> None:
    kind, is_nan, read = UNKNOWN[name]
    assert deduced(kind, "float32", is_nan=is_nan, read=read) is None
