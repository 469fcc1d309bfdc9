"""Run by ``test_gpu.py`` in a process of its own, in which Triton interprets kernels.

``./dev gpu`` runs it without the interpreter, on a GPU.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.measure import eager, gpu, traceable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPES = pytest.mark.parametrize("dtype", list(gpu.BITS), ids=str)


def numbers(pair: Any) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@DTYPES
@pytest.mark.parametrize(
    "size", [1, 7, gpu.BLOCK - 1, gpu.BLOCK, gpu.BLOCK + 1, 2 * gpu.BLOCK, 20_000]
)
def test_no_element_is_left_out(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends of blocks, and of the turns in which programs take them."""
    monkeypatch.setattr(gpu, "PROGRAMS", 3)
    for place in {0, 1, size // 2, size - 1} & set(range(size)):
        tensor = torch.full((size,), -2.0, dtype=dtype, device=DEVICE)
        tensor[place] = -math.inf
        assert numbers(gpu.read(tensor)) == (math.inf if size == 1 else 2.0, math.inf)
        tensor[place] = 0.5
        assert numbers(gpu.read(tensor)) == (0.5, 0.5 if size == 1 else 2.0)


@DTYPES
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_the_numbers_are_those_of_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    width = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}[dtype]
    values = data.draw(st.lists(st.floats(width=width, allow_nan=False), min_size=1, max_size=40))
    tensor = torch.tensor(values, dtype=torch.float64).to(DEVICE, dtype)
    assert numbers(gpu.read(tensor)) == numbers(traceable.abs_min_max(tensor))


@DTYPES
def test_nan_is_above_all(dtype: torch.dtype) -> None:
    """The smallest magnitude is that of the others."""
    low, high = numbers(
        gpu.read(torch.tensor([math.inf, math.nan, -3.0], dtype=dtype, device=DEVICE))
    )
    assert low == 3.0
    assert math.isnan(high)


@DTYPES
def test_the_dtype_of_the_numbers(dtype: torch.dtype) -> None:
    pair = gpu.read(torch.ones(2, dtype=dtype, device=DEVICE))
    assert pair is not None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert [number.dtype for number in pair] == [wide, wide]


VIEWS = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, -1),
    "part": lambda x: x[1:],
    "with gaps": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
    "requires grad": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    """What is dense in any order is read; gaps, and what is empty, are left to others."""
    tensor: Tensor = VIEWS[view](torch.arange(-4.0, 8.0, device=DEVICE).view(3, 4))
    pair = gpu.read(tensor)
    if view in ("with gaps", "empty"):
        assert pair is None
    else:
        assert numbers(pair) == numbers(traceable.abs_min_max(tensor))


def test_each_result_has_a_row_of_its_own() -> None:
    """More than are prepared at once, kept until the end as a graph keeps them."""
    pairs = [
        gpu.read(torch.tensor([float(i), i + 0.5], device=DEVICE)) for i in range(3 * gpu.ROWS)
    ]
    assert [numbers(pair) for pair in pairs] == [(i, i + 0.5) for i in range(3 * gpu.ROWS)]
    kept: list[Any] = list(pairs)
    assert torch.equal(eager.collect(kept)[:, 1].cpu(), torch.arange(3 * gpu.ROWS) + 0.5)


def test_rows_may_be_read_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        pair = gpu.read(torch.ones(2, device=DEVICE))
    assert pair is not None
    assert not pair[0].is_inference()


@DTYPES
def test_it_is_tried_before_it_is_trusted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with another answer, or none, is not used."""
    works = gpu._works.__wrapped__
    assert works(DEVICE, dtype)
    monkeypatch.setattr(gpu, "KNOWN_RANGE", (0.25, 3.0))
    assert not works(DEVICE, dtype)

    def fails() -> Any:
        raise ImportError("planted")

    monkeypatch.setattr(gpu, "_kernel", fails)
    assert not works(DEVICE, dtype)
