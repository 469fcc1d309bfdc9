"""A rule that fails on numbers which nobody had thought of hides no report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["or_else"]

RAISES = False  # in fxguard's own tests it is True: there a failure is to be seen

Answer = TypeVar("Answer")


def or_else(default: Answer, rule: Callable[..., Answer], *args: Any) -> Answer:
    """What a rule says; the default where it raises."""
    try:
        return rule(*args)
    except Exception:
        if RAISES:
            raise
        return default
