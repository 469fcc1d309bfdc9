"""Tells of events while a training runs: each once, whichever of its ranks saw it.

Of several ranks, each tells a step later. By then the others have written what they saw, because
no rank gets through a step before all have ended the one before. No rank waits, and nothing is
sent: they read each other's events in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fxguard.history._events import read_events
from fxguard.history._of_ranks import seen_by_ranks
from fxguard.report import terminal
from fxguard.report.event import Event

__all__ = ["News"]


class News:
    """The events that this process tells.

    Args:
        folder: of the history.
        rank: of this process.
        count: how many ranks there are.
    """

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        self.folder, self.rank, self.count = folder, rank, count
        self._waiting: list[Event] = []

    def tell(self, new: list[Event]) -> None:
        """Tell what waits and can be told now.

        Args:
            new: events that the step has shown which ended last; they are written already.
        """
        waiting, self._waiting = self._waiting, new
        if self.count == 1:
            self.close()
        else:
            self._tell(waiting)

    def moved(self, event: Event, sentence: str) -> None:
        """Tell that the loss has moved behind an event that was told; one of several is silent."""
        if self.count == 1:
            lines = (event.headline, f"  {sentence}", *(f"  {line}" for line in event.tried))
            terminal.write("\n".join(f"fxguard: {line}" for line in lines), sys.stderr)

    def close(self) -> None:
        """Tell what waits: no step follows."""
        waiting, self._waiting = self._waiting, []
        self._tell(waiting)

    def _tell(self, waiting: list[Event]) -> None:
        for event in self._of_this_rank(waiting):
            terminal.write("\n".join(f"fxguard: {line}" for line in event.verdict), sys.stderr)

    def _of_this_rank(self, waiting: list[Event]) -> list[Event]:
        """Those that no other rank tells, or saw the cause of."""
        if self.count == 1 or not waiting:
            return waiting
        try:
            by_rank = read_events(self.folder)
        except OSError:
            by_rank = {}
        by_rank[self.rank] = waiting  # also if this rank's folder is full
        seen = seen_by_ranks(by_rank, lambda step: range(self.count))
        return [each.event for each in seen if each.ranks[0] == self.rank]
