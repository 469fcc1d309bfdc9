"""Says on stderr that a model is being captured, once that has taken some seconds.

Nobody asked for a capture, so nobody expects to wait for one. No thread is started: the time is
looked at whenever TorchDynamo has traced a module.
"""

from __future__ import annotations

import time

from fxguard.batch import active
from fxguard.report.late_progress import LateProgress

__all__ = ["capture_begins", "capture_ends", "module_was_traced"]

AFTER = 3.0  # seconds of the processor that captures of one forward have taken


class Capturing:
    """The captures of one forward.

    Args:
        model: the class of the model.
        modules: how many it has.
    """

    def __init__(self, model: str, modules: int) -> None:
        self.modules = modules
        self.traced = 0
        self._before = 0.0  # the time that earlier captures have taken
        self._since = time.thread_time()
        self._progress = LateProgress(f"fxguard: capturing {model}", AFTER, self._taken)

    def goes_on(self) -> None:
        """Called when another capture begins."""
        self._since = time.thread_time()

    def module_was_traced(self) -> None:
        """Called when TorchDynamo has traced one more module."""
        self.traced += 1
        self._progress.advance(self.traced / max(self.modules, 1))

    def ends(self) -> None:
        """Called when a capture has ended."""
        self._before = self._taken()
        self._progress.end()

    def _taken(self) -> float:
        return self._before + time.thread_time() - self._since


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
