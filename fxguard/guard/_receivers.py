"""The receivers of a report: terminal and logger, an exception, a warning, a file, a callable.

Reports go to stderr, beside the traceback of the exception. The logger ``fxguard`` gets one record
for each report that is printed, with the report as ``record.report``: an error before an exception,
a warning before a warning.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fxguard.findings import Origin, OriginKey
from fxguard.options import Options
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report
from fxguard.source.lines import warn_user
from fxguard.verdict.report_of import Finished

__all__ = ["Detection", "Receiver", "Seen", "receivers_for"]

LOGGER = logging.getLogger("fxguard")

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


@dataclass(frozen=True, slots=True)
class Detection:
    """A report on its way out."""

    report: Report
    finished: Finished  # the batch of this rank
    error: Exception | None  # what an exception is to name as its cause
    is_new: bool  # whether one of its origins has not been reported before
    tells: bool | None  # whether this rank prints it; None if the ranks did not agree on it


Receiver = Callable[[Detection], object]


def receivers_for(options: Options, stream: str) -> Iterator[Receiver]:
    """The receivers that some options ask for."""
    on_detect = options.on_detect
    reproduced = [] if options.reproduce_to is None else [_Reproduced(options, stream)]
    if callable(on_detect):
        yield from reproduced
        yield lambda detection: on_detect(detection.report)
    elif on_detect == "raise":
        yield _Printed(stream, logging.ERROR, stops=True)
        yield from reproduced
        yield _raise
    else:
        yield _Printed(stream, logging.WARNING, stops=False)
        yield from reproduced
        yield _warn


def _raise(detection: Detection) -> None:
    raise NonFiniteError(detection.report.summary, detection.report) from detection.error


def _warn(detection: Detection) -> None:
    if detection.is_new:
        warn_user(detection.report.one_line)


class Seen:
    """The origins that were reported so far, for all threads."""

    def __init__(self) -> None:
        self._keys: set[OriginKey] = set()
        self._lock = threading.Lock()

    def adds(self, origins: Iterable[Origin]) -> bool:
        """Whether any of the origins is new; afterwards none of them is."""
        keys = {origin.key for origin in origins if not origin.follows}
        with self._lock:
            new = not keys <= self._keys
            self._keys |= keys
        return new


class _Printed:
    """Prints a report, on one of the ranks that found it, and logs it.

    Args:
        stream: name of a stream of ``sys``.
        level: level of the log record.
        stops: whether the run ends then: the report is printed even if it is not new.
    """

    def __init__(self, stream: str, level: int, *, stops: bool) -> None:
        self.stream = stream
        self.level = level
        self.stops = stops
        self.serial = next(_serials)  # the same on all ranks that instrument the same models

    def __call__(self, detection: Detection) -> None:
        report, whole = detection.report, detection.tells
        if not (detection.is_new or self.stops):
            return
        if whole is None:  # if the run ends, one report is enough, whatever other ranks found
            what = f"batch {report.batch_number}" if self.stops else report.origins[0].message
            whole = agreement.is_first_to_tell(f"{self.serial}: {what}")
        rank = agreement.current_rank()
        text = str(report) if whole else report.message
        if report.rank != rank:
            text = f"rank {rank}: told by {text}"
        terminal.write(text, getattr(sys, self.stream), flush=rank is not None)
        LOGGER.log(self.level, report.one_line, extra={"report": report})


class _Reproduced:
    """Writes the operation that a new report blames as a test, and prints where, or why not.

    Args:
        options: options with a folder.
        stream: name of a stream of ``sys``.
    """

    def __init__(self, options: Options, stream: str) -> None:
        self.options = options
        self.stream = stream

    def __call__(self, detection: Detection) -> None:
        report, folder = detection.report, self.options.reproduce_to
        if not detection.is_new or report.rank != agreement.current_rank() or folder is None:
            return
        if not agreement.is_first_to_tell(f"test of {report.origins[0].message}"):
            return  # another rank writes it
        try:
            path = report.reproduce(folder, ranges_only=self.options.reproduce_ranges_only)
            text = f"fxguard: {path} fails as the model did: pytest {path}"
        except Exception as error:  # the report matters more
            text = f"fxguard: no test was written: {error}"
        terminal.write(text, getattr(sys, self.stream))


_serials = itertools.count()
