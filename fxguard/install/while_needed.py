"""A process-wide change that stays in place while somebody needs it. Threads may share it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WhileNeeded"]


class WhileNeeded:
    """Counts the users of a change: the first makes it, the last takes it back.

    Args:
        make: makes the change, and returns a function that takes it back.
    """

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        self._make = make
        self._take_back: Callable[[], None] | None = None
        self._needed = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Register one more user of the change."""
        with self._lock:
            self._needed += 1
            if self._needed == 1:
                self._take_back = self._make()

    def end(self) -> None:
        """Remove one user of the change."""
        with self._lock:
            self._needed -= 1
            if not self._needed and self._take_back is not None:
                self._take_back()
