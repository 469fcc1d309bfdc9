"""Which classes a user wrote, and which a library brought."""

from __future__ import annotations

import sys

from fxguard.source.frame_variables import INSTALLED, STDLIB
from fxguard.source.lines import is_internal

__all__ = ["is_of_script"]


def is_of_script(kind: type) -> bool:
    """Whether a class was written in a file that nobody installed."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return bool(file) and not is_internal(file) and not file.startswith((*INSTALLED, STDLIB))
