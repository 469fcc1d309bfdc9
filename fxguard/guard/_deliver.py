"""The end of a batch: print, raise, warn or call, as the options say.

The report goes to stderr, beside the traceback of the exception; traces go to stdout, because they
were asked for. The logger ``fxguard`` gets one line for each report that is printed, with the
report as ``record.report``: an error before an exception, a warning before a warning.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from fxguard.errors import BatchLimitReached, FxguardError
from fxguard.graph.nodes import class_name
from fxguard.graph.source_lines import warn_user
from fxguard.guard._last_frames import Finished
from fxguard.guard.options import Options
from fxguard.guard.recorder import Recorder
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report
from fxguard.report.terminal import Progress
from fxguard.trace.file import TraceWriter
from fxguard.trace.trace import TracedBatch

__all__ = ["conclude", "conclude_failure", "conclude_part", "stop_after"]

LOGGER = logging.getLogger("fxguard")

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


def conclude(recorder: Recorder) -> None:
    """End the running batch: print, raise, warn or call, as the options say."""
    number = conclude_part(recorder)
    if not recorder.globs_were_checked:
        warn_of_idle_globs(recorder)
    stop_after(number, recorder.options)


def stop_after(number: int, options: Options) -> None:
    """Raise BatchLimitReached where this batch, which has finished, is to be the last one."""
    limit = options.abort_after_batch_num
    if limit is not None and number >= limit:
        raise BatchLimitReached(f"batch {number} has finished: abort_after_batch_num={limit}")


def conclude_part(recorder: Recorder) -> int:
    """The same for what may be part of a batch only; returns the number of the batch."""
    finished = recorder.finish()
    number = finished.batch.number
    if number in recorder.options.trace_batch_nums:
        if recorder.trace_writer is None:
            terminal.write(recorder.trace_text(finished), sys.stdout)
        elif unwritten := write(recorder, recorder.trace_writer, finished):
            warn_user(unwritten)
    settle(recorder, finished, None)
    return number


def warn_of_idle_globs(recorder: Recorder) -> None:
    """Say after the first batch which globs of ``ignore`` are probably misspelt."""
    recorder.globs_were_checked, batch = True, recorder.last_batch
    for pattern in () if batch is None else recorder.idle_globs(batch):
        what = "no operation of the first batch" if ":" in pattern else "no module"
        warn_user(f"ignore={pattern!r} names {what} of this {class_name(type(recorder.model))}")


def conclude_failure(recorder: Recorder, error: Exception) -> None:
    """End a batch whose forward raised; the caller raises ``error`` again.

    Raises:
        NonFiniteError: with ``error`` as its cause, where a bad value had reached what raised, or
            an output of a module.
    """
    batch = recorder.batch
    if isinstance(error, FxguardError) or recorder.options.trace_batch_nums or batch is None:
        return
    finished = Finished(batch)
    with contextlib.suppress(Exception):  # the device may be in no state to be asked; the error
        finished = recorder.finish_failed(error)  # itself matters more
    settle(recorder, finished, error)


def settle(recorder: Recorder, finished: Finished, error: Exception | None) -> None:
    """Agree with the other ranks, where that is asked for, and say what was found."""
    options, report = recorder.options, finished.report
    tells = None
    if options.sync_ranks and not options.trace_batch_nums:
        report, tells = agreement.agree(report)
    if report is None:
        return
    recorder.last_report = report
    own = report.rank == agreement.current_rank()
    unwritten = None
    if recorder.trace_writer is not None and own and recorder.is_new(recorder.written, report):
        unwritten = write(recorder, recorder.trace_writer, finished)
    try:
        if unwritten is not None:
            warn_user(unwritten)
    except RuntimeWarning as warning:  # python -W error: it hides no report
        deliver(recorder, report, tells, error or warning)
        raise
    deliver(recorder, report, tells, error)


def deliver(
    recorder: Recorder, report: Report, tells: bool | None, error: Exception | None
) -> None:
    """Print, raise, warn or call.

    Args:
        recorder: of the model.
        report: what was found.
        tells: whether this rank prints it; None where the ranks did not agree on that.
        error: what the exception names as its cause.
    """
    on_detect = recorder.options.on_detect
    if callable(on_detect):
        on_detect(report)
        return
    raises = on_detect == "raise"
    if recorder.is_new(recorder.told, report) or raises:
        if tells is None:  # where the run ends one report is enough, whatever others have found
            what = f"batch {report.batch_number}" if raises else report.origins[0].message
            tells = agreement.is_first_to_tell(f"{recorder.serial}: {what}")
        tell(report, tells, recorder.stream)
        level = logging.ERROR if raises else logging.WARNING
        LOGGER.log(level, report.message, extra={"report": report})
        if not raises:
            warn_user(report.message)
    if raises:
        raise NonFiniteError(report.summary, report) from error


def write(recorder: Recorder, writer: TraceWriter, finished: Finished) -> str | None:
    """Add every frame of a batch that has ended to the file of the traces.

    Returns:
        None, or why it could not be written: a full disk ends no training, and hides no report.
    """
    batch, report = finished.batch, finished.report
    with Progress(sys.stderr, f"tracing batch {batch.number}") as progress:
        frames = tuple(recorder.frames_of(finished, progress.advance, just_ended=True))
    verdict = () if report is None else tuple(report.verdict)
    origins = () if report is None else report.origins
    blamed = tuple(origin.frame.index for origin in origins)
    traced = TracedBatch(batch.number, frames, recorder.optimizer_step, verdict, blamed)
    try:
        writer.write(traced, agreement.current_rank())
    except OSError as error:
        return f"the trace could not be written: {error}"
    return None


def tell(report: Report, whole: bool, stream: str) -> None:
    """Print a report, in one piece, or one line where another rank does."""
    rank = agreement.current_rank()
    text = str(report) if whole else report.message
    if report.rank != rank:
        text = f"rank {rank}: told by {text}"
    terminal.write(text, getattr(sys, stream), flush=rank is not None)
