"""Regions that nodes of a graph open and close, such as autocast."""

from __future__ import annotations

from typing import Any

from fxguard.torch_names import (
    enter_autocast,
    enter_inference_mode,
    exit_autocast,
    exit_inference_mode,
)

__all__ = ["Regions"]

CLOSES: dict[Any, Any] = {
    enter_autocast: exit_autocast,
    enter_inference_mode: exit_inference_mode,
}


class Regions:
    """The open regions of a second run, which may end inside them."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []  # what closes a region, and its argument

    def passed(self, target: Any, result: Any) -> None:
        """Note a call and its result, in case it entered or left a region."""
        if target.__hash__ is not None and target in CLOSES:
            self._open.append((CLOSES[target], result))
        elif self._open and target is self._open[-1][0]:
            self._open.pop()

    def leave(self) -> None:
        """Leave all open regions."""
        while self._open:
            close, argument = self._open.pop()
            close(argument)
