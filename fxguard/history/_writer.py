"""Writes a history into a folder: a stream while a stretch is open, then a Parquet file.

Whatever happens to the folder, a training goes on: one warning, and no more is written.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxguard.forgiving import theirs
from fxguard.history import _stream
from fxguard.history._begin import begin
from fxguard.history._closing import Closing
from fxguard.history._events import add_event
from fxguard.history._files import Stretch
from fxguard.history._open_stretch import OpenStretch
from fxguard.history._series import Row, Series
from fxguard.history.needed import need_pyarrow
from fxguard.report.event import Event
from fxguard.source.lines import warn_user

__all__ = ["Writer", "need_pyarrow"]

BETWEEN = 16  # rows between two times that older stretches are thinned, a part of a second each


class Writer:
    """Writes the history of one rank of one run. Threads write one after the other.

    A forked process, such as a worker that loads data, writes nothing.

    Args:
        folder: where to write; made if it is not there. A folder that holds a history is added to.
        rank: of this process.
        about: the run, as plain data: it is kept in ``meta.json``.

    Attributes:
        broke_off: whether nothing more is written, since the disk is full or the folder gone.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, about: Mapping[str, Any]) -> None:
        self.folder, self.rank = Path(folder), rank
        self.run = 0
        self._lock = threading.RLock()
        self._positions: dict[str, int] = {}  # of series, by their names
        self._series: list[Series] = []
        self._open: OpenStretch | None = None  # None between two stretches
        self._closing = Closing(self.folder, rank)
        self._rows = 0  # of this run
        self._next = 0
        self._is_over = False
        self.broke_off = False
        self._forgiving(self._begin, about)
        _writers.add(self)

    @property
    def next_step(self) -> int:
        """The number of the next step: one behind the last one, of an earlier run too."""
        return self._next

    def register(self, series: Series) -> int:
        """The position of a series in each row. One of an earlier run continues under its name."""
        with self._lock:
            position = self._positions.setdefault(series.name, len(self._series))
            if position == len(self._series):
                self._series.append(series)
                self._forgiving(self._add_series, series)
            return position

    def add(self, row: Row) -> None:
        """Keep the numbers of a step: they are written within a second, or with the next row."""
        self._forgiving(self._add, row)

    def event(self, event: Event) -> None:
        """Keep an event, at once. One of the same step, cause and name replaces the one before."""
        self._forgiving(self._add_event, event)

    def flush(self) -> None:
        """Write what waits: a crash of this process does not lose it then."""
        self._forgiving(self._flush)

    def close(self) -> None:
        """End the run. Its open stretch is closed as well."""
        self._forgiving(self._close)
        self._end_here()

    def _forgiving(self, act: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if self._is_over:
                return
            try:
                act(*args)
            except theirs() as error:  # a full disk, a folder that is gone, pyarrow's own
                self._end_here()
                self.broke_off = True
                warn_user(f"the history in {self.folder} ends here: {error}")

    def _end_here(self) -> None:
        self._is_over = True
        if self._open is not None:
            self._open.end_here()

    def _begin(self, about: Mapping[str, Any]) -> None:
        if self.folder.is_dir():
            self._closing.recover()
        self._open = begin(self.folder, self.rank, about)
        self.run, self._next = self._open.stretch.run, self._open.stretch.first

    def _add_series(self, series: Series) -> None:
        if self._open is not None:
            self._open.add(_stream.series([series]))

    def _add(self, row: Row) -> None:
        if self._open is not None and row.step >= self._open.end:
            self._close_stretch()
        if self._open is None:
            stretch = Stretch(self.run, self.rank, row.step)
            self._open = OpenStretch(self.folder, stretch, self._series)
        self._open.add(_stream.row(row, len(self._series)))
        self._rows += 1
        self._next = row.step + 1
        if self._next >= self._open.end:
            self._close_stretch()
        elif self._rows % BETWEEN == 0:
            self._closing.tidy(row.step)

    def _close_stretch(self) -> None:
        opened, self._open = self._open, None  # after an interrupt, the next row begins another one
        if opened is not None:
            try:
                opened.write_out()
                self._closing.close(opened.stretch)
            finally:
                opened.end_here()

    def _add_event(self, event: Event) -> None:
        self._flush()
        add_event(self.folder, self.run, self.rank, event)

    def _flush(self) -> None:
        if self._open is not None:
            self._open.write_out()

    def _close(self) -> None:
        self._close_stretch()
        while self._closing.tidy(self._next - 1):
            pass

    def forked(self) -> None:
        """Leave the files to the parent; one of its threads may have held the lock."""
        self._lock = threading.RLock()
        self._end_here()


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _writers:
        writer.forked()


if hasattr(os, "register_at_fork"):  # if the system can fork
    os.register_at_fork(after_in_child=_after_fork)
