"""What a user wrote, and what a library brought."""

from __future__ import annotations

import sys

from fxguard.source.frame_variables import INSTALLED, STDLIB
from fxguard.source.lines import is_internal

__all__ = ["is_of_script", "own_files"]


def is_of_script(kind: type) -> bool:
    """Whether a class was written in a file that nobody installed."""
    return _is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def own_files() -> list[str]:
    """The files of all modules that were imported and that nobody installed."""
    found = (getattr(module, "__file__", None) or "" for module in [*sys.modules.values()])
    return sorted({file for file in found if _is_own(file)})


def _is_own(file: str) -> bool:
    return bool(file) and not is_internal(file) and not file.startswith((*INSTALLED, STDLIB))
