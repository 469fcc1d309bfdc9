"""Numerical property tests: whether any input makes an operation exceed its dtype's range.

Importing this package imports neither torch nor hypothesis: a name does, when it is first used.
Hypothesis comes with the extra ``testing``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxguard.testing.batches import like as like
    from fxguard.testing.finite import assert_finite as assert_finite
    from fxguard.testing.profile import check_profile as check_profile
    from fxguard.testing.result import Deviation as Deviation
    from fxguard.testing.result import Stability as Stability
    from fxguard.testing.search import Overflow as Overflow
    from fxguard.testing.search import find_overflow as find_overflow
    from fxguard.testing.stability import numerically_stable as numerically_stable
    from fxguard.testing.strategies import elements as elements
    from fxguard.testing.strategies import shapes as shapes
    from fxguard.testing.strategies import tensors as tensors

_HOME = {
    "Deviation": "result",
    "Overflow": "search",
    "Stability": "result",
    "assert_finite": "finite",
    "check_profile": "profile",
    "elements": "strategies",
    "find_overflow": "search",
    "like": "batches",
    "numerically_stable": "stability",
    "shapes": "strategies",
    "tensors": "strategies",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxguard.testing' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"fxguard.testing.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(f"{name} needs hypothesis: pip install hypothesis") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
