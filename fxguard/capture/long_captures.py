"""Says on stderr that a model is being captured, once that has taken some seconds.

Nobody asked for a capture, so nobody expects to wait for one. No thread is started: the time is
looked at whenever TorchDynamo has traced a module.
"""

from __future__ import annotations

import sys
import time

from fxguard.batch import active
from fxguard.report.terminal import Progress, is_terminal, write

__all__ = ["capture_begins", "capture_ends", "module_was_traced"]

AFTER = 3.0  # seconds of the processor that captures of one forward have taken


class Capturing:
    """The captures of one forward.

    Args:
        model: the class of the model.
        modules: how many it has.
    """

    def __init__(self, model: str, modules: int) -> None:
        self.model = model
        self.modules = modules
        self.traced = 0
        self._before = 0.0  # the time that earlier captures have taken
        self._since = time.thread_time()
        self._line: Progress | None = None  # on the terminal
        self._is_told = False

    def goes_on(self) -> None:
        """Called when another capture begins."""
        self._since = time.thread_time()

    def module_was_traced(self) -> None:
        """Called when TorchDynamo has traced one more module."""
        self.traced += 1
        if self._before + time.thread_time() - self._since < AFTER:
            return
        if self._line is None and is_terminal(sys.stderr):
            self._line = Progress(sys.stderr, f"fxguard: capturing {self.model}")
        if self._line is not None:
            self._line.advance(min(1.0, self.traced / max(self.modules, 1)))
        elif not self._is_told:
            text = f"fxguard: capturing {self.model} takes some seconds"
            write(text, sys.stderr, flush=True)
        self._is_told = True

    def ends(self) -> None:
        """Called when a capture has ended."""
        self._before += time.thread_time() - self._since
        if self._line is not None:
            self._line.erase()
            self._line = None


def capture_begins() -> None:
    """Called before a capture, in its thread."""
    forward = active.current()
    if forward is None or forward.batch.call is None:
        return
    if isinstance(forward.capturing, Capturing):
        forward.capturing.goes_on()
    else:
        forward.capturing = Capturing(forward.batch.call.owner, len(forward.names))


def module_was_traced() -> None:
    """Called when TorchDynamo has traced a module."""
    if (capturing := _capturing()) is not None:
        capturing.module_was_traced()


def capture_ends() -> None:
    """Called after a capture."""
    if (capturing := _capturing()) is not None:
        capturing.ends()


def _capturing() -> Capturing | None:
    forward = active.current()
    found = None if forward is None else forward.capturing
    return found if isinstance(found, Capturing) else None
