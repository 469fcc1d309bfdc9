"""Tensors that are at hand: their ranges, or the reason why there is none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fxguard
from fxguard.measure.at_hand import dtype_named, dtype_of, has_memory, own_arithmetic, range_of
from fxguard.records import Range


def test_range_or_reason() -> None:
    assert range_of(torch.tensor([-2.0, 1.0], requires_grad=True)) == Range(1.0, 2.0)
    assert range_of(torch.empty(3, device="meta")) == "meta"
    assert range_of(torch.empty(0)) == "empty"


def test_a_weight_whose_storage_was_freed_is_not_measured() -> None:
    """As FSDP frees it: the tensor keeps its shape."""
    weight = nn.Parameter(torch.ones(4))
    assert has_memory(weight)
    assert range_of(weight) == Range(1.0, 1.0)
    weight.untyped_storage().resize_(0)
    assert not has_memory(weight)
    assert range_of(weight) == "not measured"


def test_dtype_is_named_without_torch() -> None:
    assert dtype_of(torch.ones(1, dtype=torch.bfloat16)) == "bfloat16"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in ("fp16", "half", "float16", "torch.float16", "FP16")),
        *((name, torch.bfloat16) for name in ("bf16", "bfloat16", "torch.bfloat16")),
        *((name, torch.float32) for name in ("fp32", "float", "float32")),
        *((name, torch.float64) for name in ("fp64", "double", torch.float64)),
        ("e4m3", torch.float8_e4m3fn),
        ("int8", torch.int8),
    ],
)
def test_a_dtype_by_its_name(name: str | torch.dtype, dtype: torch.dtype) -> None:
    assert dtype_named(name) is dtype


@pytest.mark.parametrize("name", ["fp17", "", "nn", 16, None])
def test_what_is_no_dtype(name: Any) -> None:
    """The message shows what was given, and what would do."""
    with pytest.raises(fxguard.FxguardError, match=f"'float16', got {re.escape(repr(name))}"):
        dtype_named(name)


def test_own_arithmetic_is_not_seen() -> None:
    """Neither by a torch function mode nor by autograd; the clean twin is seen by both."""
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Mode():
        with own_arithmetic():
            assert not (x * 2).requires_grad
        assert seen == []
        assert torch.exp(x).requires_grad
    assert "exp" in seen
