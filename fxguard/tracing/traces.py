"""Traced batches: each phase of a batch is written as soon as it has run.

The forward comes first; then, if they happen, the loss that a script computes, the backward, and
the step of an optimizer. Printed traces go to stdout, because the user asked for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fxguard.batch.batch import Batch
from fxguard.batch.fingerprints import FingerprintNotes
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.loss import Loss
from fxguard.graph.nodes import class_name
from fxguard.guard.detection import Detection, Seen
from fxguard.guard.listeners import Listener, Recorded
from fxguard.ranks import agreement
from fxguard.records import Frame
from fxguard.report import terminal
from fxguard.report.terminal import Progress
from fxguard.report.text import HEADER, INDENT, frame_text
from fxguard.source.lines import warn_user
from fxguard.trace.trace import TracedBatch, place_of
from fxguard.trace.writer import TraceWriter
from fxguard.tracing.fingerprints import take_fingerprints
from fxguard.verdict.backward_report import frames_of_backward
from fxguard.verdict.report_of import Finished, glance

__all__ = ["Traces"]


class Traces(Listener):
    """Writes the traced batches of one model, and those of its reports.

    Args:
        recorder: the batches of the model.

    Attributes:
        seen: the traced batches that have run.
        first_bad: what first made an inf or a NaN in them, and where; "" if nothing did.
    """

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder)
        self.writer: TraceWriter | None = None  # None if they are printed
        if self.options.trace_to is not None:
            model = recorder.model
            name = "graph" if model is None else class_name(type(model))
            name = recorder.held_as or name
            self.writer = TraceWriter(Path(self.options.trace_to), name, torch.__version__)
        self.seen: set[int] = set()
        self.first_bad = ""
        self._written = Seen()

    @property
    def path(self) -> Path | None:
        """The trace file; None before its first batch."""
        return None if self.writer is None else self.writer.path

    def begins(self, batch: Batch) -> None:
        """Take fingerprints in a batch that will be written."""
        if self.writer is not None and self.options.traces(batch.number):
            batch.watchers.append(FingerprintNotes())

    def read(self, finished: Finished, error: Exception | None) -> Finished:
        """Look at a traced batch, and take the fingerprints of one that will be written."""
        batch, is_traced = finished.batch, self.options.traces(finished.batch.number)
        if is_traced:
            flow, first_bad = glance(batch, self.recorder.view)
            finished = replace(finished, flow=flow, first_bad=first_bad)
        if self.writer is not None and (is_traced or finished.report is not None):
            take_fingerprints(batch)
        return finished

    def ended(self, finished: Finished) -> None:
        """Write the forward of a traced batch."""
        if not self.options.traces(finished.batch.number):
            return
        batch, seen = self._traced(finished), finished.seen
        self.seen.add(batch.number)
        self._note_bad([] if finished.first_bad is None else [finished.first_bad])
        if seen is not None:
            blamed = tuple(origin.frame.index for origin in seen.origins)
            batch = replace(batch, verdict=tuple(seen.verdict), blamed=blamed)
        self._write(batch)

    def loss_came(self, loss: Loss) -> None:
        """Write what a script has computed from what a traced batch returned."""
        if not self.options.traces(loss.batch.number):
            return
        with loss.read(given=True) as batch:
            first_bad = self.recorder.first_bad_of_loss(batch)
            frames = self.recorder.frames_of_loss(batch)
            number = batch.number
            self._note_bad([] if first_bad is None else [replace(first_bad, batch_number=number)])
            self._write(TracedBatch(number, tuple(frames)), "loss")

    def backward_ended(self, kept: Sequence[KeptRun]) -> None:
        """Write the backward of traced batches."""
        for number in sorted({run.batch_number for run in kept}):
            if self.options.traces(number):
                of_batch = [run for run in kept if run.batch_number == number]
                frames = tuple(frames_of_backward(of_batch))
                self._note_bad([frame for frame in frames if frame.made_bad])
                self._write(TracedBatch(number, frames), "backward")

    def stepped(self, number: int, frames: Callable[[], Sequence[Frame]]) -> None:
        """Write the step of an optimizer after a traced batch."""
        made = tuple(frames()) if self.options.traces(number) else ()
        if made:
            self._note_bad([frame for frame in made if frame.made_bad])
            self._write(TracedBatch(number, made), "optimizer")

    def _note_bad(self, frames: Sequence[Frame]) -> None:
        if frames and not self.first_bad:
            self.first_bad = place_of(frames[0])

    def told(self, detection: Detection) -> None:
        """Write the batch of a report whose origin was not reported before."""
        if self.writer is None:
            return
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
