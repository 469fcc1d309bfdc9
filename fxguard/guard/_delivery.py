"""What becomes of a batch that has ended: each of a list of receivers hears of its report.

The report goes to stderr, beside the traceback of the exception. Traces go to stdout, because they
were asked for. The logger ``fxguard`` gets one line for each report that is printed, with the
report as ``record.report``: an error before an exception, a warning before a warning.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fxguard.batch.batch import Batch
from fxguard.batch.kept_run import KeptRun
from fxguard.errors import BatchLimitReached, FxguardError
from fxguard.findings import Origin, OriginKey
from fxguard.graph.nodes import class_name
from fxguard.graph.source_lines import warn_user
from fxguard.guard._coverage import idle_globs
from fxguard.guard._loss_scale import loss_scale_now
from fxguard.guard.recorder import Recorder
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report
from fxguard.report.terminal import Progress
from fxguard.report.text import HEADER, INDENT, absorbed_line, frame_text
from fxguard.trace.file import TraceWriter
from fxguard.trace.trace import TracedBatch
from fxguard.verdict.backward_report import BadLeaf, ReportOfBackward
from fxguard.verdict.report_of import Finished

__all__ = ["Delivery", "raised_now"]

LOGGER = logging.getLogger("fxguard")

MOST_TOLD = 64  # batches with a report, of which it is remembered that they had one

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


@dataclass(frozen=True, slots=True)
class Detection:
    """A report on its way out."""

    report: Report
    finished: Finished  # the batch of this rank
    error: Exception | None  # what an exception names as its cause
    is_new: bool  # one of its origins has not been reported before
    tells: bool | None  # whether this rank prints it; None where the ranks did not agree on that


Receiver = Callable[[Detection], object]


class Delivery:
    """The end of each batch of one recorder: judge it, and hand its report on.

    Args:
        recorder: whose batches end.
        stream: of ``sys``, where reports are printed.

    Attributes:
        last_report: the report of the last detection, or None.
        warns_of_idle_globs: whether globs of ``ignore`` that name nothing in the first batch are
            still to be warned of.
    """

    def __init__(self, recorder: Recorder, stream: str = "stderr") -> None:
        options = recorder.options
        self.recorder = recorder
        self.options = options
        self.last_report: Report | None = None
        self.warns_of_idle_globs = bool(options.ignore)
        self._file: _ToFile | None = None
        self._reported = _Seen()
        self._told: deque[int] = deque(maxlen=MOST_TOLD)
        self._not_judged = _Seen()
        self.stream = stream
        self._receivers: list[Receiver] = []
        if options.trace_to is not None:
            model = recorder.model
            name = "graph" if model is None else class_name(type(model))
            writer = TraceWriter(Path(options.trace_to), name, torch.__version__)
            self._file = _ToFile(writer, recorder)
            self._receivers.append(self._file)
        self._receivers += _receivers_for(options.on_detect, stream)

    @property
    def trace_path(self) -> Path | None:
        """The file of the traces; None before the first batch in it."""
        return None if self._file is None else self._file.writer.path

    @contextlib.contextmanager
    def batch(self, number: int | None = None) -> Iterator[Batch]:
        """A batch that begins here, and that this thread has let go of at the end of the block.

        Args:
            number: of the batch that it is a part of; None for a new one.
        """
        try:
            yield self.recorder.begin(number)
        finally:
            self.recorder.here.batch = None

    def batch_ended(self) -> None:
        """Judge the batch that runs in this thread, close it, and hand its report on.

        Raises:
            NonFiniteError: where something was found, and ``on_detect="raise"``.
            BatchLimitReached: where this was the last batch that was asked for.
        """
        number = self.part_ended()
        if self.warns_of_idle_globs:
            self._warn_of_idle_globs()
        self.stop_after(number)

    def part_ended(self) -> int:
        """The same for what may be a part of a batch; returns the number of the batch."""
        finished = self.recorder.finish()
        number = finished.batch.number
        if number in self.options.trace_batch_nums:
            if self._file is None:
                terminal.write(_trace_text(self.recorder, finished), sys.stdout)
            else:
                self._file.write(finished)
        if finished.report is None:
            self._say_not_judged(finished)
        self._deliver(finished, None)
        return number

    def batch_failed(self, error: Exception) -> None:
        """End a batch whose forward raised; the caller raises ``error`` again.

        Raises:
            NonFiniteError: with ``error`` as its cause, where a bad value had reached what raised,
                or an output of a module.
        """
        batch = self.recorder.batch
        if isinstance(error, FxguardError) or self.options.trace_batch_nums or batch is None:
            return
        finished = Finished(batch)
        with contextlib.suppress(Exception):  # the device may be in no state to be asked; the error
            finished = self.recorder.finish_failed(error)  # itself matters more
        self._deliver(finished, error)

    def backward_ended(
        self, kept: Sequence[KeptRun], leaves: Sequence[BadLeaf], has_gaps: bool
    ) -> None:
        """Report a backward, if it brought bad gradients to leaves of the model.

        Args:
            kept: the runs of graphs that gradients came to, in the order of their forward.
            leaves: whose gradients were bad; none where it was healthy.
            has_gaps: whether operations ran between graphs.

        Raises:
            NonFiniteError: with ``on_detect="raise"``.
        """
        last = self.recorder.last
        batch = Batch(0) if last is None else last.batch
        if kept and kept[-1].batch_number != batch.number:
            batch = Batch(kept[-1].batch_number)
        report = None
        if leaves and {batch.number, *(each.batch_number for each in kept)}.isdisjoint(self._told):
            report = self._backward_report(kept, leaves, has_gaps)
        self._deliver(Finished(batch, report=report), None)

    def _backward_report(
        self, kept: Sequence[KeptRun], leaves: Sequence[BadLeaf], has_gaps: bool
    ) -> Report | None:
        judge = ReportOfBackward(max_frames=self.options.max_frames_to_save)
        report, notes = judge(
            kept,
            leaves,
            self.recorder.earlier_frames,
            has_gaps=has_gaps,
            loss_scale=loss_scale_now(),
        )
        for origin in notes:
            self.recorder.notes.setdefault(origin.message, origin)
        step = self.recorder.optimizer_step
        return None if report is None else replace(report, optimizer_step=step)

    def stop_after(self, number: int) -> None:
        """Raise BatchLimitReached where this batch, which has finished, is to be the last one."""
        limit = self.options.abort_after_batch_num
        if limit is not None and number >= limit:
            raise BatchLimitReached(f"batch {number} has finished: abort_after_batch_num={limit}")

    def _deliver(self, finished: Finished, error: Exception | None) -> None:
        """Agree with the other ranks, where that is asked for, and say what was found."""
        report, tells = finished.report, None
        if self.options.sync_ranks and not self.options.trace_batch_nums:
            report, tells = agreement.agree(report)
        if report is None:
            return
        self.last_report = report
        self._told.append(report.batch_number)
        detection = Detection(report, finished, error, self._reported.adds(report.origins), tells)
        stopped: RuntimeWarning | None = None
        for receive in self._receivers:
            try:
                receive(detection)
            except RuntimeWarning as warning:  # python -W error: it hides no report
                stopped = warning
                detection = replace(detection, error=error or warning)
        if stopped is not None:
            raise stopped

    def _say_not_judged(self, finished: Finished) -> None:
        """Print once what was absorbed, and may do harm for all that anybody knows."""
        for origin in finished.absorbed:
            if origin.not_judged and self._not_judged.adds([origin]):
                terminal.write(absorbed_line(origin), getattr(sys, self.stream))

    def _warn_of_idle_globs(self) -> None:
        """Say after the first batch which globs of ``ignore`` are probably misspelt."""
        self.warns_of_idle_globs, last = False, self.recorder.last_batch
        model = self.recorder.model
        for pattern in [] if last is None else idle_globs(self.options.ignore, model, last):
            what = "no operation of the first batch" if ":" in pattern else "no module"
            warn_user(f"ignore={pattern!r} names {what} of this {class_name(type(model))}")


def raised_now() -> Exception:
    """The exception that is being handled."""
    error = sys.exc_info()[1]
    assert isinstance(error, Exception)
    return error


def _receivers_for(on_detect: str | Callable[[Report], object], stream: str) -> Iterator[Receiver]:
    """Who hears of a report."""
    if callable(on_detect):
        yield lambda detection: on_detect(detection.report)
    elif on_detect == "raise":
        yield _Printed(stream, logging.ERROR, stops=True)
        yield _raise
    else:
        yield _Printed(stream, logging.WARNING, stops=False)
        yield _warn


def _raise(detection: Detection) -> None:
    raise NonFiniteError(detection.report.summary, detection.report) from detection.error


def _warn(detection: Detection) -> None:
    if detection.is_new:
        warn_user(detection.report.one_line)


class _Seen:
    """The origins of reports, for all threads."""

    def __init__(self) -> None:
        self._keys: set[OriginKey] = set()
        self._lock = threading.Lock()

    def adds(self, origins: Iterable[Origin]) -> bool:
        """Whether one of some origins is new; now none of them is."""
        keys = {origin.key for origin in origins if not origin.follows}
        with self._lock:
            new = not keys <= self._keys
            self._keys |= keys
        return new


class _Printed:
    """Prints a report, on one of the ranks that have found it, and tells the logger.

    Args:
        stream: of ``sys``.
        level: of the logger.
        stops: whether the run ends then: the report is printed even where it is not new.
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
        if whole is None:  # where the run ends one report is enough, whatever others have found
            what = f"batch {report.batch_number}" if self.stops else report.origins[0].message
            whole = agreement.is_first_to_tell(f"{self.serial}: {what}")
        rank = agreement.current_rank()
        text = str(report) if whole else report.message
        if report.rank != rank:
            text = f"rank {rank}: told by {text}"
        terminal.write(text, getattr(sys, self.stream), flush=rank is not None)
        LOGGER.log(self.level, report.one_line, extra={"report": report})


_serials = itertools.count()


class _ToFile:
    """Writes every frame of a batch into the file of the traces."""

    def __init__(self, writer: TraceWriter, recorder: Recorder) -> None:
        self.writer = writer
        self.recorder = recorder
        self._written = _Seen()

    def __call__(self, detection: Detection) -> None:
        found_here = detection.report.rank == agreement.current_rank()
        if found_here and self._written.adds(detection.report.origins):
            self.write(detection.finished, detection.report)

    def write(self, finished: Finished, report: Report | None = None) -> None:
        """Add a batch that has ended.

        A batch that cannot be written is warned of: a full disk ends no training, and hides no
        report.
        """
        batch, recorder = finished.batch, self.recorder
        with Progress(sys.stderr, f"tracing batch {batch.number}") as progress:
            frames = tuple(recorder.frames_of(finished, progress.advance, just_ended=True))
        verdict = () if report is None else tuple(report.verdict)
        origins = () if report is None else report.origins
        blamed = tuple(o.frame.index for o in origins if o.frame.phase == "forward")
        traced = TracedBatch(batch.number, frames, recorder.optimizer_step, verdict, blamed)
        try:
            self.writer.write(traced, agreement.current_rank())
        except OSError as error:
            warn_user(f"the trace could not be written: {error}")


def _trace_text(recorder: Recorder, finished: Finished) -> str:
    """Every frame of a batch."""
    number = finished.batch.number
    frames = recorder.frames_of(finished, just_ended=True)
    return "\n".join(
        [
            f"{INDENT}*** Starting batch number={number} ***",
            HEADER,
            *map(frame_text, frames),
            f"{INDENT}*** Finished batch number={number} ***",
        ]
    )
