"""What a run of a small script proposes first, and what it does not propose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.programs import IMPORTS

__all__ = ["expect_first", "expect_not_said"]

RunHere = Callable[[str], Any]


def expect_first(run_here: RunHere, text: str, fix: str) -> None:
    """Assert that the first fix of a script, behind its imports, says something."""
    found = run_here(f"{IMPORTS}{text}")
    assert found.fixes, found.err
    assert fix in found.fixes[0], found.fixes


def expect_not_said(run_here: RunHere, text: str, fix: str) -> None:
    """Assert that a script has fixes, of which none says it."""
    found = run_here(f"{IMPORTS}{text}")
    assert found.fixes, found.err
    assert not any(fix in each for each in found.fixes), found.fixes
