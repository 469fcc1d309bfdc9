"""What the commands that read files print and write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

from fxguard.errors import FxguardError
from fxguard.report.strict_json import write_json
from fxguard.report.terminal import escaped, for_terminal

__all__ = ["STDOUT", "show", "write_page", "write_record"]

STDOUT = "- writes it to stdout, in place of the text"


class HasPage(Protocol):
    """What makes a page."""

    def to_html(self, path: Path) -> None:
        """Write the page."""


def show(text: str, *, healthy: bool | None = None) -> None:
    """Print what may come out of a file of somebody else.

    Args:
        text: what to print.
        healthy: for a verdict, whether it is good news; it has colours then.
    """
    text = escaped(text, sys.stdout)
    print(text if healthy is None else for_terminal(text, sys.stdout, healthy=healthy))


def write_record(file: str, record: dict[str, Any]) -> None:
    """Write a record as JSON.

    Raises:
        FxguardError: when it cannot be written.
        BrokenPipeError: when who reads stdout has closed it.
    """
    try:
        write_json(file, record)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise FxguardError(f"the record could not be written: {error}") from error


def write_page(shown: HasPage, path: Path, *only: Any) -> None:
    """Write the page of a result.

    Args:
        shown: the result.
        path: of the file.
        only: what of it is on the page, as its ``to_html`` takes it.

    Raises:
        FxguardError: when it cannot be written.
    """
    try:
        shown.to_html(path, *only)
    except OSError as error:
        raise FxguardError(f"the page could not be written: {error}") from error
