"""Closes stretches of a history, and thins those that are old enough.

A history holds its last 4,096 steps in full; then the smallest and the largest of 16 steps for
65,536 steps, of 256 for a million steps, and so on. Each file is written completely before those
that it replaces are removed.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fxguard.errors import UsageError
from fxguard.history._files import Stretch, is_written_now, listed, remove, remove_parts
from fxguard.history._meta import update_meta
from fxguard.history._open_stretch import STRETCH
from fxguard.history._stream import read_stream
from fxguard.history._stretches import (
    THINNING,
    level_of,
    read_parts,
    tables_of,
    thinned,
    write_stretch,
)

__all__ = ["Closing"]


class Closing:
    """The closed stretches of one rank.

    Args:
        folder: of the history.
        rank: whose stretches these are.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._levels: dict[Stretch, int] = {}  # how far each file is thinned
        self._damaged: set[Stretch] = set()  # they stay as they are
        self._may_be_due = False

    def recover(self) -> None:
        """Close what runs that have crashed have left open.

        Raises:
            OSError: when that cannot be written.
        """
        remove_parts(self.folder, self.rank)
        found, _ = listed(self.folder)
        for each in found:
            if each.rank == self.rank and each.last is None:
                try:
                    if not is_written_now(self.folder / each.name):
                        self.close(each)
                except UsageError:  # a file of somebody else's
                    continue

    def close(self, stretch: Stretch) -> None:
        """Make a Parquet file of a stream to which nothing is added any more.

        Raises:
            OSError: when that cannot be written; the stream stays.
        """
        path = self.folder / stretch.name
        stream = read_stream(path)
        if stream is not None and stream.last is not None:
            update_meta(self.folder, self.rank, series=stream.series)
            closed = Stretch(stretch.run, stretch.rank, stretch.first, stream.last)
            write_stretch(self.folder, closed, tables_of(stream), 0)
            self._levels[closed] = 0
        remove([path])
        self._may_be_due = True

    def tidy(self, now: int) -> bool:
        """Thin stretches that have become old enough, one or those that become one file.

        Args:
            now: the last step.

        Returns:
            whether there may be more to do.

        Raises:
            OSError: when the result cannot be written; what was there stays.
        """
        if not self._may_be_due:
            return False
        try:
            level, due = self._due(now)
            if due:
                self._thin(due, level)
            self._may_be_due = bool(due)
        except FileNotFoundError:  # another process of this rank does the same
            self._may_be_due = False
        except UsageError:
            self._damaged.update(due)
        return self._may_be_due

    def _due(self, now: int) -> tuple[int, list[Stretch]]:
        """The first stretches that become one, and how far these are thinned."""
        found, covered = listed(self.folder)
        remove(self.folder / each.name for each in covered if each.rank == self.rank)
        together: dict[tuple[int, int, int], list[Stretch]] = defaultdict(list)
        for each in found:
            if each.rank != self.rank or each.last is None or each in self._damaged:
                continue
            try:
                level = self._level_of(each)
            except UsageError:
                self._damaged.add(each)
                continue
            steps = STRETCH * THINNING**level
            if (each.first // steps + 1) * steps <= now + 1 - steps:
                together[each.run, level, each.first // steps].append(each)
        if not together:
            return 0, []
        key = min(together)
        return key[1], together[key]

    def _level_of(self, stretch: Stretch) -> int:
        if stretch not in self._levels:
            self._levels[stretch] = level_of(self.folder / stretch.name)
        return self._levels[stretch]

    def _thin(self, stretches: list[Stretch], level: int) -> None:
        first, last = stretches[0], stretches[-1]
        result = Stretch(first.run, first.rank, first.first, last.last)
        tables = (part for each in stretches for part in read_parts(self.folder / each.name))
        write_stretch(self.folder, result, [thinned(tables, result, level + 1)], level + 1)
        for each in stretches:
            self._levels.pop(each, None)
        self._levels[result] = level + 1
        remove(self.folder / each.name for each in stretches if each != result)
