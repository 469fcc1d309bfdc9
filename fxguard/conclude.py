"""The end of a batch: print, raise, warn or call, as the options say.

The report goes to stderr, beside the traceback of the exception; traces go to stdout, because they
were asked for. The logger ``fxguard`` gets one line for each report that is printed, with the
report as ``record.report``: an error before an exception, a warning before a warning.
"""

from __future__ import annotations

import logging
import sys
import warnings

from fxguard import console, ranks
from fxguard.batch import Batch
from fxguard.console import Progress
from fxguard.errors import BatchLimitReached, FxguardError, NonFiniteError
from fxguard.recorder import Recorder
from fxguard.report import Report
from fxguard.sources import warn_user
from fxguard.trace_file import TraceWriter
from fxguard.traces import TracedBatch

__all__ = ["conclude", "conclude_failure"]

LOGGER = logging.getLogger("fxguard")

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


def conclude(recorder: Recorder) -> None:
    """End the running batch: print, raise, warn or call, as the options say."""
    options = recorder.options
    batch = recorder.batch
    assert batch is not None
    report = recorder.finish()
    if batch.number in options.trace_batch_nums:
        if recorder.trace_writer is None:
            console.write(recorder.trace_text(batch), sys.stdout)
        else:
            write(recorder, recorder.trace_writer, batch, None)
    settle(recorder, batch, report, None)
    limit = options.abort_after_batch_num
    if limit is not None and batch.number >= limit:
        message = f"batch {batch.number} has finished: abort_after_batch_num={limit}"
        raise BatchLimitReached(message)


def conclude_failure(recorder: Recorder, error: Exception) -> None:
    """End a batch whose forward raised; the caller raises ``error`` again.

    Raises:
        NonFiniteError: with ``error`` as its cause, where a bad value had reached what raised, or
            an output of a module.
    """
    if isinstance(error, FxguardError) or recorder.options.trace_batch_nums:
        recorder.abandon()
        return
    batch = recorder.batch
    assert batch is not None
    report = None
    try:
        report = recorder.finish_failed(error)
    except Exception:  # the device may be in no state to be asked; the error itself matters more
        recorder.abandon()
    settle(recorder, batch, report, error)


def settle(
    recorder: Recorder, batch: Batch, report: Report | None, error: Exception | None
) -> None:
    """Agree with the other ranks, where that is asked for, and say what was found."""
    options = recorder.options
    tells = None
    if options.sync_ranks and not options.trace_batch_nums:
        report, tells = ranks.agree(report)
    if report is None:
        return
    recorder.last_report = report
    keys = {origin.key for origin in report.origins if not origin.follows}
    own = report.rank == ranks.current_rank()
    if recorder.trace_writer is not None and own and not keys <= recorder.written:
        recorder.written |= keys
        write(recorder, recorder.trace_writer, batch, report)
    if callable(options.on_detect):
        options.on_detect(report)
        return
    raises = options.on_detect == "raise"
    if raises or not keys <= recorder.told:
        recorder.told |= keys
        if tells is None:  # where the run ends one report is enough, whatever others have found
            what = f"batch {report.batch_number}" if raises else report.origins[0].message
            tells = ranks.is_first_to_tell(f"{recorder.serial}: {what}")
        tell(report, tells, recorder.stream)
        level = logging.ERROR if raises else logging.WARNING
        LOGGER.log(level, report.message, extra={"report": report})
        if not raises:
            warn_user(report.message)
    if raises:
        raise NonFiniteError(report.summary, report) from error


def write(recorder: Recorder, writer: TraceWriter, batch: Batch, report: Report | None) -> None:
    """Add every frame of a batch that has ended to the file of the traces."""
    with Progress(sys.stderr, f"tracing batch {batch.number}") as progress:
        frames = tuple(recorder.frames_of(batch, progress.advance))
    verdict = () if report is None else tuple(report.verdict)
    origins = () if report is None else report.origins
    blamed = tuple(origin.frame.index for origin in origins)
    traced = TracedBatch(batch.number, frames, recorder.optimizer_step, verdict, blamed)
    try:
        writer.write(traced, ranks.current_rank())
    except OSError as error:  # a full disk ends no training, and hides no report
        warnings.warn(f"the trace could not be written: {error}", RuntimeWarning, stacklevel=4)


def tell(report: Report, whole: bool, stream: str) -> None:
    """Print a report, in one piece, or one line where another rank does."""
    rank = ranks.current_rank()
    text = str(report) if whole else report.message
    if report.rank != rank:
        text = f"rank {rank}: told by {text}"
    console.write(text, getattr(sys, stream), flush=rank is not None)
