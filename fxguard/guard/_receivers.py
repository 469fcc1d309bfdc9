"""The receivers of a report: terminal and logger, an exception, a warning, a file, a callable.

Reports go to stderr, beside the traceback of the exception. The logger ``fxguard`` gets one record
for each report that is printed, with the report as ``record.report``: an error before an exception,
a warning before a warning.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator

from fxguard.guard.detection import Detection
from fxguard.guard.listeners import Listener
from fxguard.options import Options
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.errors import NonFiniteError
from fxguard.source.lines import warn_user

__all__ = ["Receiver", "receivers_for"]

LOGGER = logging.getLogger("fxguard")

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


Receiver = Callable[[Detection], object]


def receivers_for(options: Options, listeners: Iterable[Listener]) -> Iterator[Receiver]:
    """The receivers that some options ask for, in order.

    Args:
        options: what the user asked for.
        listeners: tools, which hear of a report when it is printed and before an exception ends it.
    """
    on_detect = options.on_detect
    if not callable(on_detect):
        stops = on_detect == "raise"
        yield _Printed(logging.ERROR if stops else logging.WARNING, stops=stops)
    for listener in listeners:
        yield listener.told
    if callable(on_detect):
        yield lambda detection: on_detect(detection.report)
    else:
        yield _raise if on_detect == "raise" else _warn


def _raise(detection: Detection) -> None:
    raise NonFiniteError(detection.report.summary, detection.report) from detection.error


def _warn(detection: Detection) -> None:
    if detection.is_new:
        warn_user(detection.report.one_line)


class _Printed:
    """Prints a report, on one of the ranks that found it, and logs it.

    Args:
        level: level of the log record.
        stops: whether the run ends then: the report is printed even if it is not new.
    """

    def __init__(self, level: int, *, stops: bool) -> None:
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
        terminal.write(text, getattr(sys, detection.stream), flush=rank is not None)
        LOGGER.log(self.level, report.one_line, extra={"report": report})


_serials = itertools.count()
