"""Modules that give out names of other files, which are imported when a name is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["give_out"]


def give_out(
    module: str, home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that gives out names.

    Args:
        module: its full name.
        home: for each name the file that has it, ``report.report``, or that it is, ``types``.
    """

    def getattr_(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        file = importlib.import_module(f"fxguard.{home[name]}")
        value = file if home[name] == name else getattr(file, name)
        setattr(sys.modules[module], name, value)
        return value

    def dir_() -> list[str]:
        # Otherwise `help` of the module would print every class in full.
        return [] if _is_asked_by_help() else list(sys.modules[module].__all__)

    return getattr_, dir_


def _is_asked_by_help() -> bool:
    asks: FrameType | None = sys._getframe(2)
    while asks is not None and asks.f_globals.get("__name__") == "inspect":
        asks = asks.f_back
    return asks is not None and asks.f_globals.get("__name__") == "pydoc"
