"""The ways in which a model runs: left to Python, captured, and captured for AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PYTHON, EAGER, AOT = WAYS = ("python", "eager", "aot_eager")


@contextlib.contextmanager
def the_way(way: str) -> Iterator[None]:
    """No capture at all for ``python``."""
    with torch.compiler.set_stance("force_eager" if way == PYTHON else "default"):
        yield


def prepared(model: nn.Module, way: str) -> Callable[..., Any]:
    """What to call: TorchDynamo is in front of an instrumented model anyway."""
    return torch.compile(model, backend=AOT) if way == AOT else model


def parts(value: Any) -> list[Tensor]:
    """The dense tensors in an output."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in parts(item)]
    if value.is_meta:
        return [torch.tensor(value.shape)]
    if value.is_quantized:
        return [value.int_repr()]
    if value.is_nested:
        return [value.values(), value.offsets()]
    if is_traceable_wrapper_subclass(value):
        return parts([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    if value.layout is not torch.strided:
        return [value.to_dense()]
    return [value.as_subclass(Tensor)]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Two outputs are of one type and agree in every bit, NaN included."""
    assert type(actual) is type(expected), f"the model gave {actual!r}"
    ours, theirs = parts(actual), parts(expected)
    assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(raw(one), raw(other)), "the bits differ"


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)
