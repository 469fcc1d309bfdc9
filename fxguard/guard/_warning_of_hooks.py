"""Torch warns where a compiled module is called and a global hook stands: it calls the hook twice.

While losses are followed such hooks are fxguard's, and a second call does them no harm. The warning
sends users to look for hooks that they never made, and ``python -W error`` ends a healthy training.
"""

from __future__ import annotations

import threading
import warnings

__all__ = ["WarningOfHooks"]

MESSAGE = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


class WarningOfHooks:
    """Keeps the warning silent while somebody needs it. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed = 0
        self._filter: object = None  # as it stands in `warnings.filters`

    def silence(self) -> None:
        """One more needs it."""
        with self._lock:
            self._needed += 1
            if self._needed == 1:
                warnings.filterwarnings("ignore", message=MESSAGE, category=UserWarning)
                self._filter = warnings.filters[0]

    def restore(self) -> None:
        """One less does."""
        with self._lock:
            self._needed -= 1
            if not self._needed and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # it is a list
