"""Kinds of operations that several tables of rules name.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._rule import names_in as _names
from fxguard.graph.poles import SUMS

__all__ = ["DIVISIONS", "LOG", "REDUCED"]

LOG = _names("log log10 log2")
DIVISIONS = _names("addcdiv div floor_divide fmod reciprocal remainder")
REDUCED = SUMS | _names("mean logcumsumexp")
