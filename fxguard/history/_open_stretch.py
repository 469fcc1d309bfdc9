"""The stretch that a history is in: its records wait a second, and are then added to its stream."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fxguard.history import _stream
from fxguard.history._files import Stretch, begin_alone
from fxguard.history._series import Series

__all__ = ["STRETCH", "OpenStretch"]

STRETCH = 4096  # steps; a stretch ends where a multiple of it begins
SECONDS = 1.0  # that records wait
BYTES = 1 << 20  # that wait at most


class OpenStretch:
    """A stream that only this process writes.

    Args:
        folder: it is there.
        stretch: run, rank and first step.
        series: those that are registered already.

    Attributes:
        end: the first step that is not in it.

    Raises:
        FileExistsError: if another process writes it.
        OSError: when it cannot be made.
    """

    def __init__(self, folder: Path, stretch: Stretch, series: Sequence[Series]) -> None:
        self.stretch, self.path = stretch, folder / stretch.name
        self.end = (stretch.first // STRETCH + 1) * STRETCH
        self._descriptor = begin_alone(self.path)
        self._inode = os.fstat(self._descriptor).st_ino
        self._waiting = [_stream.head(stretch.run, stretch.rank), _stream.series(series)]
        self._bytes = 0  # that wait
        self._size = 0  # of the whole records in the file
        self.write_out()

    def add(self, record: bytes) -> None:
        """Add a record, and write those that wait if it is time to.

        Raises:
            OSError: when they cannot be written.
        """
        self._waiting.append(record)
        self._bytes += len(record)
        if self._bytes > BYTES or time.monotonic() - self._written > SECONDS:
            self.write_out()

    def write_out(self) -> None:
        """Write what waits. It is in the file completely, or the file is as it was.

        Raises:
            OSError: when it cannot be written, or somebody has removed the file.
        """
        self._written = time.monotonic()
        waiting, self._waiting, self._bytes = b"".join(self._waiting), [], 0
        if self.path.stat().st_ino != self._inode:
            raise FileNotFoundError(f"{self.path} is another file now")
        try:
            left = memoryview(waiting)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BaseException:  # an interrupt, too
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(waiting)

    def end_here(self) -> None:
        """Leave the file as it is."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
