"""A last word before SIGTERM ends a process, which dies of the signal as it would without fxguard.

Python's own way to hear of the signal is a handler. A script does not see this one:
``signal.getsignal`` answers as if there were none, so that trainers that hand a signal on to the
handler before theirs do not find it. A handler of the script's own takes its place.

Python runs handlers between two instructions of the main thread. A rank may wait for other ranks
inside a single one, and has to die at once all the same: there is no handler in ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Terminated"]


class Terminated:
    """Calls a function when SIGTERM is about to end this process.

    Args:
        last_word: called in the main thread, between any two instructions; it must not wait.
    """

    def __init__(self, last_word: Callable[[], object]) -> None:
        self.last_word = last_word
        self.process = os.getpid()
        self._set, self._get = signal.signal, signal.getsignal
        self._own: tuple[Any, Any] = (self._signal, self._getsignal)
        self.listens = False
        os.register_at_fork(after_in_child=self.stop)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listen while the block runs."""
        self.listen()
        try:
            yield
        finally:
            self.stop()

    def listen(self) -> None:
        """Begin to listen, if the signal would end this process, and this is its main thread."""
        if threading.current_thread() is not threading.main_thread() or _is_rank():
            return
        if self.listens or self._get(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self.listens = True
        self._set(signal.SIGTERM, self._handle)
        signal.signal, signal.getsignal = self._own

    def stop(self) -> None:
        """Stop listening."""
        if not self.listens:
            return
        if self._get(signal.SIGTERM) == self._handle:
            try:
                self._set(signal.SIGTERM, signal.SIG_DFL)
            except ValueError:  # not the main thread: it goes on listening
                return
        self.listens = False
        if (signal.signal, signal.getsignal) == self._own:
            signal.signal, signal.getsignal = self._set, self._get

    def _handle(self, number: int, frame: object) -> None:
        self.stop()  # a second signal ends the process at once
        try:
            if os.getpid() == self.process:
                self.last_word()
        finally:
            os.kill(os.getpid(), number)

    def _signal(self, number: Any, handler: Any) -> Any:
        before = self._set(number, handler)
        return signal.SIG_DFL if before == self._handle else before

    def _getsignal(self, number: Any) -> Any:
        found = self._get(number)
        return signal.SIG_DFL if found == self._handle else found


def _is_rank() -> bool:
    """Whether this process is one of several that may wait for each other."""
    return os.environ.get("WORLD_SIZE", "1") != "1"
