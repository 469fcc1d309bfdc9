"""The end of a batch: print, raise, warn or call, as the options say."""

from __future__ import annotations

import warnings

from fxguard.errors import BatchLimitReached, NonFiniteError
from fxguard.recorder import Recorder

__all__ = ["conclude"]


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
        if callable(options.on_detect):
            options.on_detect(report)
        else:
            origin = report.origins[0].message
            if options.on_detect == "raise" or origin not in recorder.printed:
                recorder.printed.add(origin)
                print(report)
            if options.on_detect == "raise":
                raise NonFiniteError(report.message, report)
            warnings.warn(report.message, RuntimeWarning, stacklevel=2)
    limit = options.abort_after_batch_num
    if limit is not None and batch.number >= limit:
        message = f"batch {batch.number} has finished: abort_after_batch_num={limit}"
        raise BatchLimitReached(message)
