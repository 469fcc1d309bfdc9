"""Traced batches: each phase of a batch is written as soon as it has run.

The forward comes first; then, if they happen, the loss that a script computes, the backward, and
the step of an optimizer. Printed traces go to stdout, because the user asked for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from fxguard.batch.kept_run import KeptRun
from fxguard.guard._receivers import Detection, Seen
from fxguard.guard.recorder import Recorder
from fxguard.ranks import agreement
from fxguard.records import Frame
from fxguard.report import terminal
from fxguard.report.terminal import Progress
from fxguard.report.text import HEADER, INDENT, frame_text
from fxguard.source.lines import warn_user
from fxguard.trace.trace import TracedBatch, place_of
from fxguard.trace.writer import TraceWriter
from fxguard.verdict.backward_report import frames_of_backward
from fxguard.verdict.report_of import Finished

__all__ = ["Traces"]


class Traces:
    """Writes the traced batches of one recorder.

    Args:
        recorder: the recorder of the batches.
        writer: the writer of their file; None if they are printed.

    Attributes:
        seen: the traced batches that have run.
        first_bad: what first made an inf or a NaN in them, and where; "" if nothing did.
    """

    def __init__(self, recorder: Recorder, writer: TraceWriter | None) -> None:
        self.recorder = recorder
        self.writer = writer
        self.seen: set[int] = set()
        self.first_bad = ""
        self._written = Seen()

    def wants(self, number: int) -> bool:
        """Whether a batch is traced."""
        return number in self.recorder.options.trace_batch_nums

    def batch_ended(self, finished: Finished) -> None:
        """Called when the forward of a traced batch has ended."""
        batch, seen = self._traced(finished), finished.seen
        self.seen.add(batch.number)
        self._note_bad([] if finished.first_bad is None else [finished.first_bad])
        if seen is not None:
            blamed = tuple(origin.frame.index for origin in seen.origins)
            batch = replace(batch, verdict=tuple(seen.verdict), blamed=blamed)
        self._write(batch)

    def loss_came(
        self, number: int, frames: Sequence[Frame], first_bad: Frame | None = None
    ) -> None:
        """Called when a script has computed a loss from what a batch returned."""
        self._note_bad([] if first_bad is None else [replace(first_bad, batch_number=number)])
        self._write(TracedBatch(number, tuple(frames)), "loss")

    def backward_ended(self, kept: Sequence[KeptRun]) -> None:
        """Called with the graph runs that gradients reached, in the order of their forward."""
        for number in sorted({run.batch_number for run in kept}):
            if self.wants(number):
                of_batch = [run for run in kept if run.batch_number == number]
                frames = tuple(frames_of_backward(of_batch))
                self._note_bad([frame for frame in frames if frame.made_bad])
                self._write(TracedBatch(number, frames), "backward")

    def stepped(self, number: int, frames: Sequence[Frame]) -> None:
        """Called when an optimizer has made a step after a batch."""
        self._note_bad([frame for frame in frames if frame.made_bad])
        self._write(TracedBatch(number, tuple(frames)), "optimizer")

    def _note_bad(self, frames: Sequence[Frame]) -> None:
        if frames and not self.first_bad:
            self.first_bad = place_of(frames[0])

    def report(self, detection: Detection) -> None:
        """Write the batch of a report whose origin was not reported before."""
        report, finished = detection.report, detection.finished
        found_here = report.rank == agreement.current_rank()
        if not found_here or not self._written.adds(report.origins):
            return
        # The optimizer has written weights since.
        batch = self._traced(finished, just_ended=report.phase != "optimizer")
        number = batch.number
        later = [f for f in report.frames if f.phase != "forward" and f.batch_number == number]
        blamed = tuple(
            origin.frame.index
            if origin.frame.phase == "forward"
            else len(batch.frames) + later.index(origin.frame)
            for origin in report.origins
            if origin.frame.phase == "forward" or origin.frame in later
        )
        frames = (*batch.frames, *later)
        self._write(replace(batch, frames=frames, verdict=tuple(report.verdict), blamed=blamed))

    def _traced(self, finished: Finished, *, just_ended: bool = True) -> TracedBatch:
        recorder, number = self.recorder, finished.batch.number
        if self.writer is None:
            frames = recorder.frames_of(finished, just_ended=just_ended)
        else:
            with Progress(sys.stderr, f"tracing batch {number}") as progress:
                frames = recorder.frames_of(finished, progress.advance, just_ended=just_ended)
        return TracedBatch(number, tuple(frames), recorder.optimizer_step)

    def _write(self, batch: TracedBatch, phase: str = "") -> None:
        """Add a batch, or a later phase of it, to the file, or print it.

        Failure to write only warns: a full disk must not end a training or hide a report.
        """
        if self.writer is None:
            terminal.write(_text(batch, phase), sys.stdout)
            return
        try:
            self.writer.write(batch, agreement.current_rank(), is_later=bool(phase))
        except OSError as error:
            warn_user(f"the trace could not be written: {error}")


def _text(batch: TracedBatch, phase: str) -> str:
    what = f"{phase} of batch number={batch.number}".removeprefix(" of ")
    return "\n".join(
        [
            f"{INDENT}*** Starting {what} ***",
            *batch.verdict,
            HEADER,
            *map(frame_text, batch.frames),
            f"{INDENT}*** Finished {what} ***",
        ]
    )
