"""A change of the process that stands while somebody needs it. Threads may share it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WhileNeeded"]


class WhileNeeded:
    """Counts who needs a change: the first makes it, the last takes it back.

    Args:
        make: makes it, and returns what takes it back.
    """

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        self._make = make
        self._take_back: Callable[[], None] | None = None
        self._needed = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """One more needs it."""
        with self._lock:
            self._needed += 1
            if self._needed == 1:
                self._take_back = self._make()

    def end(self) -> None:
        """One less does."""
        with self._lock:
            self._needed -= 1
            if not self._needed and self._take_back is not None:
                self._take_back()
