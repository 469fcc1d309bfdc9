"""Progress of work that nobody expects to wait for: shown once it has taken some seconds.

Knows nothing of torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from fxguard.report.terminal import Progress, is_terminal, write

__all__ = ["LateProgress"]

AFTER = 3.0  # seconds


class LateProgress:
    """A line on a terminal that goes when the work ends; elsewhere one line that stays.

    Args:
        what: the work, "fxguard: capturing T5".
        after: how many seconds pass before anything is shown; :data:`AFTER` by default.
        clock: gives the seconds; it may stand still between parts of the work.

    Example:
        >>> progress = LateProgress("fxguard: error budget of T5")
        >>> progress.advance(0.3)
        >>> progress.end()
    """

    def __init__(
        self, what: str, after: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.clock = what, clock
        self.after = AFTER if after is None else after
        self._begun = clock()
        self._line: Progress | None = None
        self._is_told = False

    def advance(self, share: float) -> None:
        """Show the share of the work done so far, from 0 to 1."""
        if self.clock() - self._begun < self.after:
            return
        if self._line is None and is_terminal(sys.stderr):
            self._line = Progress(sys.stderr, self.what)
        if self._line is not None:
            self._line.advance(min(share, 1.0))
        elif not self._is_told:
            write(f"{self.what} takes some seconds", sys.stderr, flush=True)
        self._is_told = True

    def end(self) -> None:
        """Erase the line, if there is one."""
        if self._line is not None:
            self._line.erase()
            self._line = None
