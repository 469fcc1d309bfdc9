"""The magnitude ranges of tensors in memory, read by the part of this package that is in C.

It is built where there is a C compiler when fxguard is installed. Without it everything works, and
:mod:`fxguard.measure.eager` measures with torch's operations, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["abs_min_max", "is_built"]

Reader = Callable[[object], tuple[float, float] | None]


def _unread(value: object) -> tuple[float, float] | None:
    return None


def _reader() -> Reader:
    try:
        from fxguard.measure import _native
    except ImportError:
        return _unread
    exchange = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    _native.bind(exchange, Tensor, torch.nn.Parameter)
    reader: Reader = _native.abs_min_max
    return reader


# The smallest and the largest magnitude in a tensor, or None for what has to be asked otherwise: a
# tensor that is empty, of a subclass, on another device, without memory of its own, or of a rare
# dtype; and what is no tensor. Where there is a NaN the largest is one, and the smallest is that of
# the others.
abs_min_max = _reader()

is_built = abs_min_max is not _unread
