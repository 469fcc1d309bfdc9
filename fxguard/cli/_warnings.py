"""Warnings of a script name the line that they would name without fxguard, once each.

A warning names the function that gives it, or one so many calls above. Operations of a guarded
model are called by fxguard, by TorchDynamo or by the code of a graph, so that the place is not the
script's, and Python's filters decide by the wrong place. Each warning that is about to be shown
passes here, and the filters decide again, by the place in plain Python. What is given while a graph
is captured that nobody asked for is dropped: the operation gives its warning when it runs. What is
given in a second run is dropped, too: the first run has given it.

The parts of Python's ``warnings`` in use (3.10 to 3.13):

- ``_showwarnmsg``: called with each warning to be shown, also from C.
- ``__warningregistry__``: where each module keeps what was shown.
- ``_filters_mutated``: called when filters change; what was shown is then shown again. A capture
  changes filters for a moment, of which the script must see nothing.
"""

from __future__ import annotations

import os.path
import re
import sys
import threading
import warnings
from types import FrameType, ModuleType
from typing import Any

import fxguard
from fxguard.capture.plain_stack import Call, plain_calls, running_calls
from fxguard.capture.quiet import DROPPING, captures_quietly
from fxguard.forgiving import or_else
from fxguard.source.numpy_warnings import WARNED

__all__ = ["Warnings"]

# Modules that stand between a script and its operations. Whatever the filters say, warnings that
# name them are handed on to be judged by their real place.
BETWEEN = re.compile(r"fxguard\.|torch\.overrides$")

# What runs under a file of these packages is a second run.
AGAIN = tuple(
    os.path.join(os.path.dirname(fxguard.__file__), name) for name in ("rerun", "verdict")
)


class Warnings:
    """While entered, shows warnings at the place that they have in plain Python."""

    def __init__(self) -> None:
        self._entry: Any = ("always", None, Warning, BETWEEN, 0)
        self._original: Any = None
        self._mutated: Any = None
        self._own: Any = (self._show, self._change)
        self._here = threading.local()  # `decides`: the filters judge a warning again

    def __enter__(self) -> Warnings:
        module: Any = warnings
        WARNED.clear()
        self._original, self._mutated = module._showwarnmsg, module._filters_mutated
        module.filters.insert(0, self._entry)
        module._filters_mutated()
        module._showwarnmsg, module._filters_mutated = self._own
        DROPPING.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        module: Any = warnings
        DROPPING.discard(self)
        if (module._showwarnmsg, module._filters_mutated) == self._own:
            module._showwarnmsg, module._filters_mutated = self._original, self._mutated
        if self._entry in module.filters:
            module.filters.remove(self._entry)
            module._filters_mutated()

    def _change(self) -> None:
        """Replaces ``warnings._filters_mutated``."""
        if not captures_quietly():
            self._mutated()

    def _show(self, message: warnings.WarningMessage) -> None:
        """Replaces ``warnings._showwarnmsg``."""
        if getattr(self._here, "decides", False):
            self._original(message)
            return
        frame: FrameType | None = sys._getframe(1)
        landed = _frame_of(message, frame)
        if landed is None:  # of ``warn_explicit``, which names any place
            self._original(message)
            return
        if captures_quietly() or _is_of_second_run(frame):
            _forget(message, landed)
            return
        or_else(None, WARNED.note, str(message.message), landed)
        place = _plain_place(frame, landed)
        if place is None:
            self._original(message)
            return
        _forget(message, landed)
        self._here.decides = True
        try:
            known = _globals_at(place)
            warnings.warn_explicit(
                message.message,
                message.category,
                place.file,
                place.line,
                module=known.get("__name__") or "<unknown>",
                registry=known.setdefault("__warningregistry__", {}),
                source=message.source,
            )
        finally:
            self._here.decides = False


def _frame_of(message: warnings.WarningMessage, frame: FrameType | None) -> FrameType | None:
    """The frame that a warning names."""
    while frame is not None:
        if frame.f_lineno == message.lineno and frame.f_code.co_filename == message.filename:
            return frame
        frame = frame.f_back
    return None


def _is_of_second_run(frame: FrameType | None) -> bool:
    """Whether fxguard looks for a cause now, or runs something again for it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(AGAIN):
            return True
        frame = frame.f_back
    return False


def _plain_place(frame: FrameType | None, landed: FrameType) -> Call | None:
    """Where plain Python would have been; None if it is where the warning says."""
    calls = running_calls(frame)
    if not any(call.is_ours for call in calls):
        return None
    above = next(i for i, call in enumerate(reversed(calls)) if call.frame is landed)
    plain = plain_calls(calls)
    place = plain[max(len(plain) - 1 - above, 0)]
    return None if place.frame is landed and not place.is_changed else place


def _globals_at(place: Call) -> dict[str, Any]:
    """The module of a place, as far as it can be found."""
    if place.frame is not None:
        return place.frame.f_globals
    main = sys.modules.get("__main__")
    for module in (main, *list(sys.modules.values())):
        if isinstance(module, ModuleType) and getattr(module, "__file__", None) == place.file:
            return vars(module)
    return {}


def _forget(message: warnings.WarningMessage, landed: FrameType) -> None:
    """Let the filters show the same warning again."""
    keys = [(str(message.message), message.category, line) for line in (message.lineno, 0)]
    registry = landed.f_globals.get("__warningregistry__")
    if isinstance(registry, dict):
        for key in keys:
            registry.pop(key, None)
    warnings.onceregistry.pop(keys[0][:2], None)  # type: ignore[attr-defined]
