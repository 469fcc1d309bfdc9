"""The end of a batch: print, raise, warn or call, as the options say."""

from __future__ import annotations

import warnings

from fxguard import ranks
from fxguard.errors import BatchLimitReached, FxguardError, NonFiniteError
from fxguard.recorder import Recorder
from fxguard.report import Report

__all__ = ["conclude", "conclude_failure"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


def conclude(recorder: Recorder) -> None:
    """End the running batch: print, raise, warn or call, as the options say."""
    options = recorder.options
    batch = recorder.batch
    assert batch is not None
    report = recorder.finish()
    text = recorder.trace_text(batch)
    if text is not None:
        print(text)
    settle(recorder, report, None)
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
    report = None
    try:
        report = recorder.finish_failed(error)
    except Exception:  # the device may be in no state to be asked; the error itself matters more
        recorder.abandon()
    settle(recorder, report, error)


def settle(recorder: Recorder, report: Report | None, error: Exception | None) -> None:
    """Agree with the other ranks, where that is asked for, and say what was found."""
    options = recorder.options
    tells = None
    if options.sync_ranks and not options.trace_batch_nums:
        report, tells = ranks.agree(report)
    if report is None:
        return
    recorder.last_report = report
    if callable(options.on_detect):
        options.on_detect(report)
        return
    origin = report.origins[0].message
    if options.on_detect == "raise" or origin not in recorder.printed:
        recorder.printed.add(origin)
        if tells is None:  # where the run ends one report is enough, whatever others have found
            what = f"batch {report.batch_number}" if options.on_detect == "raise" else origin
            tells = ranks.is_first_to_tell(f"{recorder.serial}: {what}")
        tell(report, tells)
    if options.on_detect == "raise":
        raise NonFiniteError(report.message, report) from error
    warnings.warn(report.message, RuntimeWarning, stacklevel=3)


def tell(report: Report, whole: bool) -> None:
    """Print a report, in one piece, or one line where another rank does."""
    rank = ranks.current_rank()
    text = str(report) if whole else report.message
    if report.rank != rank:
        text = f"rank {rank}: told by {text}"
    print(text + "\n", end="", flush=rank is not None)
