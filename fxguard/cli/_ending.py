"""How a run that was watched ends: what is said, and with which status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from fxguard.cli._processes import Note
from fxguard.errors import BatchLimitReached
from fxguard.report.errors import NonFiniteError

__all__ = ["DETECTED", "FAILED", "end", "last_line", "say"]

DETECTED = 3  # exit status after a detection
FAILED = 1  # after an exception of the script's own


def end(
    error: BaseException | None,
    note: Note,
    show: Callable[[BaseException], object],
    traces: Iterable[Path] = (),
) -> int | None:
    """Say what a run came to.

    Args:
        error: what ended it; None where it came to its end.
        note: what all its processes have found.
        show: shows the traceback of an exception of the script's own.
        traces: files that were written.

    Returns:
        The exit status; None where it is the script's own and :func:`last_line` is due.
    """
    for path in traces:
        say(f"for a page of the whole batch: fxguard report {path}")
    if isinstance(error, BatchLimitReached):
        say(str(error))
        return 0
    if isinstance(error, NonFiniteError):
        say(error.report.advice)
        return DETECTED
    # What another process raised comes here as text in an exception of torch's.
    if error is not None and not (note.detections and NonFiniteError.__name__ in str(error)):
        show(error)
        if not note.detections:
            return FAILED
    if not note.detections:
        return None
    went_on = "" if error is not None else "the script went on after a detection: "
    say(went_on + note.detections[0])
    return DETECTED


def last_line(note: Note) -> None:
    """Say what was checked; of the ranks of a distributed run the first one does."""
    if os.environ.get("RANK", "0") == "0":
        say(note.summary.line())


def say(line: str) -> None:
    """One line of fxguard's, after what the script has printed."""
    with contextlib.suppress(Exception):  # the script may have closed it
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        print(f"fxguard: {line}", file=sys.stderr, flush=True)
