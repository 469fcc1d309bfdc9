"""Exit statuses of the command ``fxguard``; docs/records.md has the same table."""

from __future__ import annotations

import enum

__all__ = ["Status"]


class Status(enum.IntEnum):
    """How a command ended. Where several are true of a run, the first of 3, 1, 4, 5, 0 counts."""

    FINE = 0
    FAILED = 1  # the script's own failure
    DIFFERENT = 1  # two things that were compared differ
    WRONG_USE = 2
    NOTHING = 2  # nothing could be compared
    DAMAGED = 2  # a file could not be read
    DETECTED = 3
    EVENT = 4  # of a history, with --stop-at-event
    NOTED = 5  # a quiet fault, with --fail-on note
    PIPE_CLOSED = 141  # by `| head`: as shells report it, 128 + SIGPIPE
