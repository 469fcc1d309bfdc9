"""Decides in which batches to look for underflows, and whether to report them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fxguard.batch.batch import Batch
from fxguard.forgiving import or_else
from fxguard.guard.listeners import Listener, Recorded
from fxguard.underflow._between_graphs import LostBetween
from fxguard.underflow._report import ReportOfUnderflow
from fxguard.verdict.report_of import Finished

__all__ = ["EVERY", "Underflows"]

# Batches whose number is a multiple of this are examined: the first one, and few after it. Each
# costs up to one more run of its graphs, in eager mode.
EVERY = 100


class Underflows(Listener):
    """The underflows of one model.

    Args:
        recorder: the batches of the model.
        share: the share of lost elements from which on an operation is reported.
    """

    def __init__(self, recorder: Recorded, share: float) -> None:
        super().__init__(recorder)
        self.traced = self.options.trace_batch_nums
        self._judge = ReportOfUnderflow(
            share=share,
            view=recorder.view,
            max_frames=self.options.max_frames_to_save,
            is_ignored=self.options.ignores,
        )

    def begins(self, batch: Batch) -> None:
        """Note losses between graphs, in the batches that are examined."""
        if self.options.traces(batch.number) if self.traced else batch.number % EVERY == 0:
            batch.watchers.append(LostBetween(self._judge.share))

    def read(self, finished: Finished, error: Exception | None) -> Finished:
        """Examine a batch that is due and in which nothing was found.

        A traced batch gets no report: detection is off.
        """
        batch = finished.batch
        if error is not None or finished.report is not None or batch.watcher(LostBetween) is None:
            return finished
        found = or_else(Finished(batch), self._judge, batch, self.recorder.earlier_frames)
        if found.report is None:
            return finished
        report = replace(found.report, optimizer_step=self.recorder.optimizer_step)
        if not self.traced:
            return replace(finished, flow=found.flow, report=report)
        for origin in report.origins:
            self.recorder.notes.setdefault(origin.message, origin)
        return replace(finished, flow=found.flow, seen=report)

    def coverage(self) -> str:
        """How many operations could not be judged, and why."""
        reasons = sorted(Counter(list(self._judge.not_judged.values())).items())
        listed = ", ".join(f"{count} ({why})" for why, count in reasons)
        return f"; underflow not judged: {listed}" if reasons else ""
