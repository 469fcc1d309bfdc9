"""Number formats: the largest and smallest numbers of each, and the distance from them.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "FORMATS",
    "HALVES",
    "LIMITS",
    "NEAR_LIMIT",
    "Format",
    "format_of",
    "headroom",
    "is_mask",
    "limit_of",
    "spelled_out",
]


@dataclass(frozen=True, slots=True)
class Format:
    """The range of a binary floating-point format.

    Example:
        >>> FORMATS["float16"].max
        65504.0
    """

    name: str  # of torch's dtype, without "torch."
    max: float  # the largest finite number; numbers up to half a unit larger round to it
    smallest_normal: float  # positive; numbers below it have fewer digits, or are flushed to zero
    eps: float  # the distance from 1 to the next number

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal one: IEEE 754-2019, 3.3: bᵉᵐⁱⁿ⁻ᵖ⁺¹."""
        return self.smallest_normal * self.eps

    def loses(self, number: float) -> bool:
        """Whether a nonzero number becomes 0 in this format.

        Numbers up to half the smallest number round to 0. Vector kernels also flush numbers below
        the smallest normal number of float32.

        Example:
            >>> FORMATS["float16"].loses(1e-8), FORMATS["float16"].loses(1e-7)
            (True, False)
        """
        flushed = min(self.smallest_normal, FORMATS["float32"].smallest_normal)
        return 0 < abs(number) <= self.smallest / 2 or 0 < abs(number) < flushed

    def overflows(self, number: float) -> bool:
        """Whether a finite number becomes infinite in this format.

        Numbers less than half a unit above the largest one round down to it.

        Example:
            >>> FORMATS["float16"].overflows(65519), FORMATS["float16"].overflows(65520)
            (False, True)
        """
        half_a_unit = 2.0 ** (math.floor(math.log2(self.max)) - 1) * self.eps
        return math.isfinite(number) and abs(number) - self.max >= half_a_unit

    def bits_below_max(self, magnitude: float) -> float:
        """How many times a finite magnitude above 0 can double before it is the largest number."""
        return math.log2(self.max) - math.log2(magnitude)  # the ratio may be too large for a float

    def bits_above_min(self, magnitude: float) -> float:
        """How many times it can halve before it is the smallest normal number."""
        return math.log2(magnitude) - math.log2(self.smallest_normal)


# Written as the formats define them: all digits of the significand, and an exponent. Sources: IEEE
# 754-2019; for 8 bits "FP8 Formats for Deep Learning" (arXiv 2209.05433) and, for fnuz, "8-bit
# Numerical Formats for Deep Neural Networks" (arXiv 2206.02915). float8_e8m0fnu holds scales
# without a sign, and float4_e2m1fn_x2 two numbers per element: no operation of a model computes in
# them.
HALVES = frozenset(["bfloat16", "float16"])

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("float64", (2 - 2**-52) * 2.0**1023, 2.0**-1022, 2.0**-52),
        Format("float32", (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-23),
        Format("bfloat16", (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-7),
        Format("float16", (2 - 2**-10) * 2.0**15, 2.0**-14, 2.0**-10),
        Format("float8_e4m3fn", 1.75 * 2.0**8, 2.0**-6, 2.0**-3),
        Format("float8_e5m2", 1.75 * 2.0**15, 2.0**-14, 2.0**-2),
        Format("float8_e4m3fnuz", 1.875 * 2.0**7, 2.0**-7, 2.0**-3),
        Format("float8_e5m2fnuz", 1.75 * 2.0**15, 2.0**-15, 2.0**-2),
    )
}


# The largest finite number of each dtype that models compute in. Masks made of it turn into -inf
# when something is added to them.
LIMITS = {name: FORMATS[name].max for name in ("float16", "bfloat16", "float32", "float64")}

NEAR_LIMIT = 0.98  # share of a limit from which the bound of a clamp is there to hide overflow


# The format of each part of a complex number.
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def format_of(dtype: str) -> Format | None:
    """The format of a dtype's elements, or of the parts of its complex elements."""
    return FORMATS.get(PARTS.get(dtype, dtype))


# Other names of dtypes.
SHORT = {
    **dict.fromkeys(("fp16", "half", "f16"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp32", "float", "f32"), "float32"),
    **dict.fromkeys(("fp64", "double", "f64"), "float64"),
    **dict.fromkeys(("fp8_e4m3", "e4m3", "e4m3fn", "float8_e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2"),
}


def spelled_out(dtype: str) -> str:
    """The name that torch gives a dtype.

    Example:
        >>> spelled_out("bf16"), spelled_out("torch.float16"), spelled_out("int8")
        ('bfloat16', 'float16', 'int8')
    """
    name = dtype.strip().lower().removeprefix("torch.")
    return SHORT.get(name, name)


def limit_of(dtype: str) -> float:
    """The largest finite number of a dtype; NaN, which equals nothing, if it is not known.

    Example:
        >>> limit_of("float16") == 65504.0
        True
    """
    return LIMITS.get(dtype, math.nan)


def is_mask(dtype: str, magnitude: float) -> bool:
    """Whether a magnitude is the largest number of its dtype, which masks are made of.

    For numbers from files, which have six digits: differences below one in 100,000 do not count.
    Numbers in memory are to be compared with :func:`limit_of`: one near the limit may be an
    activation.

    Example:
        >>> is_mask("float16", 65504.0)
        True
    """
    limit = FORMATS.get(dtype)
    return limit is not None and abs(magnitude - limit.max) <= 1e-5 * limit.max


def headroom(dtype: str, magnitude: float) -> float:
    """How far a tensor is from overflowing, in bits: how many times its magnitudes can double.

    Args:
        dtype: dtype of the tensor, such as "float16".
        magnitude: the largest magnitude in the tensor.

    Returns:
        Infinity if there is no meaningful answer: the limit of the dtype is not known, or the
        tensor holds only zeros, or a mask. Minus infinity if the tensor holds an inf or a NaN.
        Negative if the dtype cannot hold the magnitude, as in a forecast.

    Example:
        >>> round(headroom("float16", 8188.0), 1)
        3.0
    """
    if not math.isfinite(magnitude):
        return -math.inf
    limit = FORMATS.get(dtype)
    if limit is None or magnitude <= 0 or is_mask(dtype, magnitude):
        return math.inf
    return limit.bits_below_max(magnitude)
