"""The end of a batch: print, raise, warn or call, as the options say."""

from __future__ import annotations

import warnings

from fxguard.errors import BatchLimitReached, FxguardError, NonFiniteError
from fxguard.recorder import Recorder
from fxguard.report import Report

__all__ = ["conclude", "conclude_failure"]


def conclude(recorder: Recorder) -> None:
    """End the running batch: print, raise, warn or call, as the options say."""
    options = recorder.options
    batch = recorder.batch
    assert batch is not None
    report = recorder.finish()
    text = recorder.trace_text(batch)
    if text is not None:
        print(text)
    if report is not None:
        announce(recorder, report, None)
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
    try:
        report = recorder.finish_failed(error)
    except Exception:  # the device may be in no state to be asked; the error itself matters more
        recorder.abandon()
        return
    if report is not None:
        announce(recorder, report, error)


def announce(recorder: Recorder, report: Report, error: Exception | None) -> None:
    """Print, raise, warn or call."""
    options = recorder.options
    if callable(options.on_detect):
        options.on_detect(report)
        return
    origin = report.origins[0].message
    if options.on_detect == "raise" or origin not in recorder.printed:
        recorder.printed.add(origin)
        print(report)
    if options.on_detect == "raise":
        raise NonFiniteError(report.message, report) from error
    warnings.warn(report.message, RuntimeWarning, stacklevel=3)
