"""The files of a history: their names say run, rank and steps, so that a listing tells what counts.

``run0-rank0-000000000000-000000004095.parquet`` holds the steps of a closed stretch, and
``run0-rank0-000000004096.stream`` the open one, from that step on. A file is written under another
name and renamed. Where a file covers another one, because a crash came before that was removed, the
larger one counts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Stretch",
    "begin_alone",
    "is_written_now",
    "listed",
    "meta_name",
    "remove",
    "remove_parts",
    "replace",
]

NAME = re.compile(
    r"run(?P<run>\d+)-rank(?P<rank>\d+)-(?P<first>\d{12,})(?:-(?P<last>\d{12,})\.parquet|\.stream)"
)
RECENT = 600.0  # seconds: where locks do not tell, a file that was written since is written now


@dataclass(frozen=True, order=True, slots=True)
class Stretch:
    """Steps of one run of one rank, in a file of their own."""

    run: int
    rank: int
    first: int  # step
    last: int | None = None  # of a closed one; it has no step behind that

    @property
    def name(self) -> str:
        """Of the file."""
        begin = f"run{self.run}-rank{self.rank}-{self.first:012d}"
        return f"{begin}.stream" if self.last is None else f"{begin}-{self.last:012d}.parquet"

    def covers(self, other: Stretch) -> bool:
        """Whether this file holds all that the other one does, and is not that file."""
        if self == other or self.last is None or (self.run, self.rank) != (other.run, other.rank):
            return False
        end = other.first if other.last is None else other.last
        return self.first <= other.first and end <= self.last


def listed(folder: Path) -> tuple[list[Stretch], list[Stretch]]:
    """The stretches that count, in order of run, rank and steps, and those that others cover.

    Raises:
        OSError: when there is no such folder.
    """
    found = []
    for name in os.listdir(folder):
        if match := NAME.fullmatch(name):
            run, rank, first, last = match.groups()
            found.append(
                Stretch(int(run), int(rank), int(first), None if last is None else int(last))
            )
    found.sort(key=lambda each: (each.run, each.rank, each.first, -(each.last or 0)))
    counts: list[Stretch] = []
    covered: list[Stretch] = []
    # Each stands behind those that may cover it, and those that count do not overlap.
    for stretch in found:
        is_covered = bool(counts) and counts[-1].covers(stretch)
        (covered if is_covered else counts).append(stretch)
    return counts, covered


def meta_name(rank: int) -> str:
    """The name of the file with the series and runs of a rank."""
    return f"meta-rank{rank}.json" if rank else "meta.json"


def replace(path: Path, data: bytes) -> None:
    """Write a file completely or not at all.

    Raises:
        OSError: when it cannot be written; then the old one stays.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:  # an interrupt, too
        remove([aside])
        raise


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already, as far as that is possible."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # what is left is covered by another file
            continue


def remove_parts(folder: Path, rank: int) -> None:
    """Remove what programs of a rank that were killed have left behind while they wrote a file."""
    for path in folder.glob(f".*-rank{rank}[-.]*.part"):
        try:
            if time.time() - path.stat().st_mtime > RECENT:
                path.unlink()
        except OSError:  # another process does the same
            continue


def begin_alone(path: Path) -> int:
    """A descriptor of a new file that only this process writes.

    Raises:
        FileExistsError: when somebody else has made it.
        OSError: when it cannot be made.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    descriptor = os.open(aside, flags, 0o666)
    try:
        _lock(descriptor, alone=True)
        os.link(aside, path)  # so that nobody sees it without its lock
    except FileExistsError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without links
        os.close(descriptor)
        descriptor = os.open(path, flags, 0o666)
        _lock(descriptor, alone=True)
    finally:
        remove([aside])
    return descriptor


def is_written_now(path: Path) -> bool:
    """Whether a process that is alive has begun the file and not ended it.

    Raises:
        OSError: when there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        locked = _lock(descriptor, alone=False)
    finally:
        os.close(descriptor)
    return time.time() - path.stat().st_mtime < RECENT if locked is None else not locked


def _lock(descriptor: int, *, alone: bool) -> bool | None:
    """Whether this process now has the lock of a file; None where files have none.

    Those who only look whether there is a writer share the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return None
    return True
