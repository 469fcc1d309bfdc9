"""Begins a run in the folder of a history: which run it is, and at which step it goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxguard.history._files import Stretch, is_written_now, listed
from fxguard.history._meta import RunOfRank, plain, update_meta
from fxguard.history._open_stretch import OpenStretch
from fxguard.history._stream import glance

__all__ = ["begin"]

TRIES = 20  # the ranks of a run begin together, and each closes what it had left open


def begin(folder: Path, rank: int, about: Mapping[str, Any]) -> OpenStretch:
    """The open stretch of a new run of a rank.

    Raises:
        UsageError: if the folder has files of another version, or damaged ones.
        OSError: when it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(TRIES)):
        try:
            stretch = _next_run(folder, rank)
            opened = OpenStretch(folder, stretch, ())
            break
        except (FileNotFoundError, FileExistsError):  # other processes begin a run here, too
            if not tries_left:
                raise
            time.sleep(0.01)
    run = RunOfRank(stretch.run, rank, stretch.first, time.time(), plain(about))
    update_meta(folder, rank, runs=[run])
    return opened


def _next_run(folder: Path, rank: int) -> Stretch:
    """The first stretch of the run that begins now, which other ranks may have begun already."""
    found, _ = listed(folder)
    newest = max((each.run for each in found), default=-1)
    of_newest = [each for each in found if each.run == newest]
    joins = all(each.rank != rank for each in of_newest) and any(
        each.last is None and is_written_now(folder / each.name) for each in of_newest
    )
    run = newest if joins else newest + 1
    before = [_last_step(folder, each) for each in found if each.run < run]
    return Stretch(run, rank, max(before, default=-1) + 1)


def _last_step(folder: Path, stretch: Stretch) -> int:
    if stretch.last is not None:
        return stretch.last
    _, last = glance(folder / stretch.name)
    return stretch.first - 1 if last is None else last
