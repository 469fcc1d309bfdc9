"""Whether a number of a second run is that of the first one."""

from __future__ import annotations

import math

__all__ = ["TOLERANCE", "same_magnitude"]

# How far apart the largest magnitudes of the two runs may be: compilers keep more digits between
# fused operations. Different random numbers differ by more.
TOLERANCE = 0.02


def same_magnitude(one: float, other: float) -> bool:
    """Whether the largest magnitudes of two runs come from the same computation."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-30)
    return str(one) == str(other)
