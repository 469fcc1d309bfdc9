"""``FXGUARD=1 python train.py``: the same as ``fxguard run``, without another command.

``import torch`` calls this file (see ``_fxguard_autoload``) before the parts of torch that fxguard
needs are ready. Everything else therefore waits for the first call of a module.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fxguard.cli._ending import end, last_line, say
from fxguard.cli._processes import OPTIONS, SWITCH, Notes, is_on
from fxguard.cli._settings import UnreadError, options_of, settings_of_project
from fxguard.cli._statuses import Status
from fxguard.forgiving import theirs
from fxguard.report.errors import NonFiniteError

if TYPE_CHECKING:
    from fxguard.cli._session import Session

__all__ = ["arm"]


def arm() -> None:
    """Watch this process from the first call of a module on, if FXGUARD is switched on."""
    global _armed
    if _armed is None and is_on(os.environ.get(SWITCH)):
        settings = settings_here()
        options_of(settings)  # while an error can still be reported in one line
        _armed = Armed(settings)


class Armed:
    """A process that is watched from the first call of a module until the process ends."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.notes = Notes()
        self.notes.tell_children(settings)
        self.session: Session | None = None
        self.original: Any = Module.__call__
        self.before = sys.excepthook
        sys.excepthook = self.hook
        self.ended = False
        atexit.register(self.close)
        self.lock = threading.Lock()
        self.call = self.make_call(self.original)
        Module.__call__ = self.call  # type: ignore[method-assign]

    def make_call(self, original: Any) -> Any:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(module, *args, **kwargs)
            self.begin()
            return Module.__call__(module, *args, **kwargs)

        return call

    def begin(self) -> None:
        """Import what is needed, and guard the modules that are called from now on."""
        with self.lock:
            if Module.__call__ is not self.call:  # another thread has begun
                return
            Module.__call__ = self.original  # type: ignore[method-assign]
            try:
                from fxguard.capture.dynamo import leave_to_python
                from fxguard.cli._session import Session

                leave_to_python(self.call)
                self.session = Session(self.settings)
            except theirs() as error:  # options that do not fit, a torch that is too old
                say(f"FXGUARD is set and has no effect: {error}")
            else:
                self.session.warnings.__enter__()
                self.session.outermost.__enter__()
                if self.notes.is_owner:
                    self.session.terminated.listen()

    def hook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Replaces ``sys.excepthook``.

        Raises:
            SystemExit: to end with a status other than 1. Python allows that here.
        """
        if isinstance(error, NonFiniteError) and not self.notes.is_owner:
            raise SystemExit(Status.DETECTED)  # the owner says what to look at
        status = self.end(error, self.show)
        if isinstance(error, KeyboardInterrupt):
            return  # Python ends by the signal
        if status not in (None, Status.FAILED):
            raise SystemExit(status)

    def show(self, error: BaseException) -> None:
        """Show a traceback as Python itself would."""
        if self.session is not None:
            from fxguard.capture.tracebacks import hide_frames

            hide_frames(error)
        self.before(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Print what remains to be printed when this process ends."""
        if not self.ended and self.notes.is_owner and self.end(None, lambda error: None):
            say("the status is the script's own; under `fxguard run` it would be 3")

    def end(
        self, error: BaseException | None, show: Callable[[BaseException], object]
    ) -> int | None:
        self.ended = True
        offers: list[str] = []
        if self.session is not None:
            self.session.terminated.stop()
            note = self.session.close()
            offers = self.session.offers
        else:
            note = self.notes.read()
            if self.notes.is_owner:
                self.notes.remove()
        status = end(error, note, show, offers, tells=self.notes.is_owner)
        if status is None and self.notes.is_owner:
            last_line(note)
        return status


def settings_here() -> dict[str, Any]:
    """The options of the parent process, or else those of the project."""
    if given := os.environ.get(OPTIONS):
        found: dict[str, Any] = json.loads(given)
        return found
    script = sys.argv[0] if sys.argv else ""
    start = Path.cwd() if script in ("", "-c", "-m") else Path(os.path.abspath(script)).parent
    try:
        return settings_of_project(start)
    except UnreadError as error:
        say(str(error))
        return {}


_armed: Armed | None = None
