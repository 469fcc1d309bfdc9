"""Keeps a rule that fails on unexpected numbers from hiding a report."""

from __future__ import annotations

from fxguard.forgiving import or_else

__all__ = ["or_else"]
