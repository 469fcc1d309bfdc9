"""The limit of a dtype in words, where an operation has exceeded it or may have."""

from __future__ import annotations

import math
import re

from fxguard.findings import BROUGHT, Origin
from fxguard.formats import FORMATS
from fxguard.records import RowRole

__all__ = ["limit_text", "needs_text"]

# They are infinite at one number, or of an infinity: no number is beyond a dtype.
LOGARITHMS = frozenset(("atanh", "log", "log10", "log1p", "log2", "logit"))
# How those begin that make large numbers of small ones.
STEEP = (
    *("cosh", "cumprod", "exp", "float_power", "ldexp", "linalg_matrix_exp", "matrix_exp"),
    *("matrix_power", "pow", "prod", "sinh", "special_exp"),
)
_IN_FLOAT64 = re.compile(r" is (\S+) in float64")
MANY = 1e6  # products that may add up


def needs_text(origin: Origin) -> str:
    """How far an operation exceeded the limit; "" if it did not.

    For an underflow, what was lost.
    """
    if origin.largest_lost is not None and (form := FORMATS.get(origin.dtype)) is not None:
        return (
            f"it lost up to {origin.largest_lost:.1e}; the smallest number of {origin.dtype} is "
            f"{form.smallest:.1e}"
        )
    if origin.problem != "inf" or origin.limit is None:
        return ""
    if origin.cause not in ("overflow", "unknown") or origin.what in BROUGHT:
        return ""  # of a pole: a larger dtype does not help
    if origin.phase == "optimizer" and origin.cause == "unknown":  # perhaps a setting was infinite
        return ""
    if origin.needed is None:
        is_told = origin.cause == "overflow" or _may_overflow(origin, origin.limit)
        return f"{origin.dtype} holds {limit_text(origin.limit)}" if is_told else ""
    if math.isinf(origin.needed):
        return "" if " in float64" in origin.operands else "it is infinite in float64 too"
    if origin.needed <= origin.limit:
        return ""
    ratio = f"{origin.needed / origin.limit:.3g}"
    times = f"{'just over' if ratio == '1' else ratio + ' times'} what {origin.dtype} holds"
    what = "its largest element" if _is_of_another(origin, origin.needed) else "it"
    return f"{what} needs {origin.needed:.4g}, {times} ({limit_text(origin.limit)})"


def _is_of_another(origin: Origin, needed: float) -> bool:
    """Whether the number that is told is that of an element, and not the largest."""
    told = _IN_FLOAT64.search(origin.operands)
    return told is not None and not math.isclose(abs(float(told[1])), needed, rel_tol=1e-3)


def _may_overflow(origin: Origin, limit: float) -> bool:
    """Whether an infinity of unknown cause may be beyond a dtype, as far as magnitudes tell."""
    name = origin.what.strip("_")
    if origin.phase == "backward":
        return True
    if name in LOGARITHMS:
        return False
    read = [row for row in origin.frame.rows if row.role is not RowRole.OUTPUT]
    sizes = [row.abs_max for row in read if row.abs_max is not None]
    if not sizes or not all(map(math.isfinite, sizes)) or name.startswith(STEEP):
        return True
    if name in ("reciprocal", "rsqrt") or (name == "div" and len(sizes) == 2):
        least = read[-1].abs_min or 0.0
        return least > 0 and max(1.0, *sizes) / least >= limit / MANY
    return name == "div" or max(sizes) ** 2 * MANY >= limit


def limit_text(value: float) -> str:
    """``65504``, ``3.4e+38``."""
    return f"{value:.0f}" if value < 1e6 else f"{value:.3g}"
