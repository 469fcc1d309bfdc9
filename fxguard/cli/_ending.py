"""How a watched run ends: what is printed, and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from fxguard.cli._processes import Note
from fxguard.cli._statuses import Status
from fxguard.errors import BatchLimitReached
from fxguard.forgiving import where_theirs_may_raise
from fxguard.report.errors import HistoryEvent, NonFiniteError
from fxguard.report.terminal import escaped

__all__ = ["end", "last_line", "say"]


def end(
    error: BaseException | None,
    note: Note,
    show: Callable[[BaseException], object],
    offers: Iterable[str] = (),
    *,
    tells: bool = True,
) -> int | None:
    """Print the result of a run.

    Args:
        error: what ended the run, an interrupt too; None if it ran to its end.
        note: what all processes of the run have found.
        show: shows the traceback of an exception of the script's own.
        offers: what can be done with the files that were written, in lines.
        tells: whether this is the process that says what was checked.

    Returns:
        The exit status; None if the script decides it and :func:`last_line` is still to be called.
    """
    for offer in offers:
        say(offer)
    if isinstance(error, BatchLimitReached):
        say(str(error))
        if tells:
            last_line(note)
        return Status.FINE
    if isinstance(error, HistoryEvent):
        say(f"stopped at the event of {error}")
        if tells:
            last_line(note)
        return Status.EVENT
    if isinstance(error, NonFiniteError):
        say(error.report.advice)
        return Status.DETECTED
    # An exception of another process arrives here as text inside an exception of torch's.
    if error is not None and not (note.detections and NonFiniteError.__name__ in str(error)):
        show(error)
        if not note.detections:
            if tells and note.summary.batches:
                last_line(note)
            return Status.FAILED
    if not note.detections:
        return None
    went_on = "" if error is not None else "the script went on after a detection: "
    say(went_on + note.detections[0])
    return Status.DETECTED


def last_line(note: Note, *, flush: bool = True) -> None:
    """Print what was checked; in a distributed run only the first rank does.

    What does not repeat is told by the rank whose machine it is.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    for line in note.lines if is_first else note.of_this_machine:
        say(line, flush=flush)


def say(line: str, *, flush: bool = True) -> None:
    """Print one line of fxguard's own.

    Args:
        line: the line.
        flush: whether what the script has printed comes first.
    """
    if flush:
        with where_theirs_may_raise():  # the script may have closed the stream
            sys.stdout.flush()
    with where_theirs_may_raise():  # or have put another object there
        text = escaped(f"fxguard: {line}", sys.stderr)
        print(text, file=sys.stderr, flush=True)
