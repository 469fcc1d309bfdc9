"""Exact ranges of tensors, by ``struct`` and plain Python loops; tensors from raw bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.measure.traceable import decode
from fxguard.records import Range

often = settings(deadline=None, max_examples=150)


@dataclass(frozen=True)
class Format:
    """A float dtype, and what each of its bit patterns means."""

    dtype: torch.dtype
    bits: int
    mantissa: int
    decode: Callable[[int], float]

    @property
    def edges(self) -> list[int]:
        """Zero, the subnormal and normal ends, infinity and NaN, with both signs."""
        fraction = (1 << self.mantissa) - 1
        sign = 1 << (self.bits - 1)
        infinity = (sign - 1) & ~fraction
        ends = {0, 1, fraction, fraction + 1, infinity - 1, infinity, infinity + 1, sign - 1}
        return sorted(pattern | s for pattern in ends for s in (0, sign))

    def tensor(self, patterns: list[int]) -> Tensor:
        raw = b"".join(pattern.to_bytes(self.bits // 8, "little") for pattern in patterns)
        if not raw:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(self.dtype)


def by_struct(code: str, shift: int = 0) -> Callable[[int], float]:
    size = struct.calcsize(code)
    return lambda bits: struct.unpack(f"<{code}", (bits << shift).to_bytes(size, "little"))[0]


def float8(mantissa: int, bias: int, *, ieee: bool = False, unsigned_zero: bool = False) -> Any:
    """The float8 formats of the OCP paper (and of its "fnuz" variants)."""

    def value(bits: int) -> float:
        sign = -1.0 if bits & 0x80 else 1.0
        exponent, fraction = (bits & 0x7F) >> mantissa, bits & ((1 << mantissa) - 1)
        top = (1 << (7 - mantissa)) - 1
        if unsigned_zero and bits == 0x80:
            return math.nan
        if ieee and exponent == top:
            return math.nan if fraction else sign * math.inf
        if not ieee and not unsigned_zero and bits & 0x7F == 0x7F:
            return math.nan
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - bias - mantissa)
        return sign * (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)

    return value


FORMATS = (
    Format(torch.float16, 16, 10, by_struct("e")),
    Format(torch.bfloat16, 16, 7, by_struct("f", shift=16)),
    Format(torch.float32, 32, 23, by_struct("f")),
    Format(torch.float64, 64, 52, by_struct("d")),
    Format(torch.float8_e4m3fn, 8, 3, float8(3, 7)),
    Format(torch.float8_e4m3fnuz, 8, 3, float8(3, 8, unsigned_zero=True)),
    Format(torch.float8_e5m2, 8, 2, float8(2, 15, ieee=True)),
    Format(torch.float8_e5m2fnuz, 8, 2, float8(2, 16, unsigned_zero=True)),
    Format(torch.float8_e8m0fnu, 8, 0, lambda b: math.nan if b == 0xFF else 2.0 ** (b - 127)),
)
WIDE_ENOUGH_FOR_TORCH = FORMATS[:4]  # float8 has no finfo for every variant


def as_is(x: Any) -> Any:
    return x


def transposed(x: Any) -> Any:
    return x.swapaxes(0, -1) if x.ndim else x


def every_other(x: Any) -> Any:
    return x[..., ::2] if x.ndim else x


def without_first(x: Any) -> Any:
    return x[1:] if x.ndim else x


def expanded(x: Any) -> Any:
    shape = (3, *x.shape)
    return x.expand(shape) if isinstance(x, Tensor) else np.broadcast_to(x, shape)


VIEWS = (as_is, transposed, every_other, without_first, expanded)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def floats(draw: Any, formats: tuple[Format, ...] = FORMATS) -> tuple[Tensor, np.ndarray]:
    """A tensor of a float dtype from raw bits, and the same numbers as float64."""
    form, shape, view = (
        draw(st.sampled_from(formats)),
        draw(shapes),
        draw(st.sampled_from(VIEWS)),
    )
    size = math.prod(shape)
    pattern = st.one_of(st.sampled_from(form.edges), st.integers(0, (1 << form.bits) - 1))
    patterns = draw(st.lists(pattern, min_size=size, max_size=size))
    if draw(st.booleans()):  # half of them are clean, however many elements there are
        patterns = [p if math.isfinite(form.decode(p)) else 1 for p in patterns]
    values = np.array([form.decode(p) for p in patterns], dtype=np.float64)
    return view(form.tensor(patterns).reshape(shape)), view(values.reshape(shape))


def expected(values: np.ndarray) -> Range | str:
    """The range by a plain loop."""
    low, high, empty = math.inf, 0.0, True
    for value in values.ravel().tolist():
        if math.isnan(value):
            return Range(math.nan, math.nan)
        low, high, empty = min(low, abs(value)), max(high, abs(value)), False
    return "empty" if empty else Range(low, high)


def exact(number: Range | str) -> Any:
    """Something that compares equal for equal bits, NaN included."""
    return number if isinstance(number, str) else (number.abs_min.hex(), number.abs_max.hex())


def read(statistics: Tensor) -> list[Any]:
    return [exact(decode(low, high)) for low, high in statistics.tolist()]
