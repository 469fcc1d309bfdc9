"""Arguments of operations as JSON, and back: tensors are numbers of values, dtypes are names."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxguard.recording.recorded import Ref

__all__ = ["DTYPES", "Unknown", "decoded", "encoded", "name_of"]

DTYPES = {
    name: dtype
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
OBJECTS = {
    str(x): x
    for x in (
        *(torch.strided, torch.contiguous_format, torch.preserve_format),
        *(torch.channels_last, torch.channels_last_3d),
    )
}
DEEPEST = 8  # containers in each other


class Unknown:
    """An argument that a folder does not hold: an operation with one does not run again."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def encoded(x: Any) -> Any:
    """An argument as JSON has it."""
    if isinstance(x, Ref):
        return {"value": x.value}
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, int):
        return int(x)
    if isinstance(x, float):
        return float(x) if math.isfinite(x) else {"float": str(float(x))}
    if isinstance(x, (list, tuple)):
        return [encoded(item) for item in x]
    if isinstance(x, torch.dtype):
        return {"dtype": name_of(x)}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if str(x) in OBJECTS:
        return {"object": str(x)}
    return {"unknown": type(x).__name__}


def decoded(x: Any, count: int, depth: int = 0) -> Any:
    """An argument from JSON.

    Args:
        x: what JSON holds.
        count: how many values there are; a larger number is refused.
        depth: of containers around it.

    Raises:
        ValueError: if it is nothing that :func:`encoded` makes.
    """
    if depth > DEEPEST:
        raise ValueError("containers too deep in each other")
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, list):
        return [decoded(item, count, depth + 1) for item in x]
    if isinstance(x, dict) and len(x) == 1:
        ((kind, held),) = x.items()
        if kind == "value" and type(held) is int and 0 <= held < count:
            return Ref(held)
        if kind == "float" and held in ("inf", "-inf", "nan"):
            return float(held)
        if kind == "dtype" and held in DTYPES:
            return DTYPES[held]
        if kind == "device" and isinstance(held, str):
            return torch.device("cpu")
        if kind == "object" and held in OBJECTS:
            return OBJECTS[held]
        if kind == "unknown" and isinstance(held, str):
            return Unknown(held)
    raise ValueError(f"an argument that no recording holds: {str(x)[:80]}")
