"""How far apart the ranges of one value are in two batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fxguard.trace.batch_diff import distance
from fxguard.types import Row

INF, NAN = math.inf, math.nan


def row(low: float | None, high: float | None, dtype: str = "float32") -> Row:
    return Row("output", low, high, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.0, 2.0), (0.0, 2.0), 0.0),
        ((0.0, 1.0), (0.0, 2.0), 0.5),
        ((1.0, 4.0), (2.0, 4.0), 0.25),
        ((1e-9, 1.0), (3e-9, 1.0), 2e-9),  # the smallest of many is an accident
        ((0.0, 0.0), (0.0, 0.0), 0.0),
        ((0.0, INF), (0.0, INF), 0.0),
        ((NAN, NAN), (NAN, NAN), 0.0),
        ((0.0, INF), (0.0, 1.0), INF),
        ((NAN, NAN), (0.0, INF), INF),
        ((None, None), (0.0, 1.0), None),
    ],
)
def test_distance(a: Any, b: Any, expected: float | None) -> None:
    """Relative to the larger magnitude, the same both ways."""
    for x, y in ((a, b), (b, a)):
        assert distance(row(*x), row(*y)) == pytest.approx(expected)


def test_masks_of_the_largest_number() -> None:
    """``torch.finfo(dtype).min`` in float32 and in float16 is the same mask."""
    masks = [
        row(0.0, torch.finfo(getattr(torch, name)).max, name) for name in ("float32", "float16")
    ]
    assert distance(*masks) == 0
    assert distance(masks[0], row(0.0, 65504.0)) == pytest.approx(1)
