"""Globs that name modules and operations in them. Knows nothing of torch."""

from __future__ import annotations

import fnmatch

__all__ = ["matches"]


def matches(pattern: str, module: str, operation: str) -> bool:
    """Whether a glob such as ``decoder.*`` or ``*.SelfAttention:log`` names an operation."""
    of_module, _, of_operation = pattern.partition(":")
    return fnmatch.fnmatchcase(module, of_module) and fnmatch.fnmatchcase(
        operation, of_operation or "*"
    )
