"""The last batches in which nothing was found; reports show their frames."""

from __future__ import annotations

import threading
from collections import deque

from fxguard.batch.batch import Batch
from fxguard.batch.brief import BriefBatch

__all__ = ["LastFrames"]


class LastFrames:
    """The last batches in which nothing was found: as many as a report may show frames of.

    It alone owns this ring. Threads that call one model add to the ring and read it at the same
    time, so each method holds the lock, and :meth:`batches` returns a copy.

    Args:
        wanted: how many frames the batches need to have in total.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self._lock = threading.Lock()
        # With the number of their frames.
        self._batches: deque[tuple[Batch | BriefBatch, int]] = deque()
        self._count = 0  # of their frames in total

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: Batch | BriefBatch, frames: int) -> None:
        """Keep a batch that was closed, and drop the batches that it makes superfluous.

        Args:
            batch: a batch that has finished.
            frames: how many frames it has at least.
        """
        with self._lock:
            self._batches.append((batch, frames))
            self._count += frames
            while self._count - self._batches[0][1] >= self.wanted:
                self._count -= self._batches.popleft()[1]

    def clear(self) -> None:
        """Forget the batches: a report shows no frames from before another report."""
        with self._lock:
            self._batches.clear()
            self._count = 0

    def batches(self) -> list[Batch]:
        """The batches that are kept, the last to finish first."""
        with self._lock:
            kept = [batch for batch, _ in reversed(self._batches)]
        return [each.batch if isinstance(each, BriefBatch) else each for each in kept]
