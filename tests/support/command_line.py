"""The command ``fxguard``, run in this process."""

from __future__ import annotations

from typing import Any

from fxguard.cli import main


def status(*argv: str) -> Any:
    """The exit status of ``fxguard`` with these arguments."""
    try:
        return main.main([*argv])
    except SystemExit as end:
        return end.code
