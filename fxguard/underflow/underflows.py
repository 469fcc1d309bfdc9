"""Decides in which batches to look for underflows, and whether to report them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fxguard.batch.frames import FrameView
from fxguard.options import Options
from fxguard.underflow._report import ReportOfUnderflow
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.report_of import EarlierFrames, Finished

__all__ = ["EVERY", "Underflows"]

# Batches whose number is a multiple of this are examined: the first one, and few after it. Each
# costs up to one more run of its graphs, in eager mode.
EVERY = 100


class Underflows:
    """The underflows of one model. Threads may share it.

    Args:
        options: what the user asked for.
        view: which frames a report shows.
    """

    def __init__(self, options: Options, view: FrameView) -> None:
        self.share = options.underflow
        self.traced = tuple(options.trace_batch_nums)
        self._judge: ReportOfUnderflow | None = None
        if options.underflow is not None:
            self._judge = ReportOfUnderflow(
                share=options.underflow,
                view=view,
                max_frames=options.max_frames_to_save,
                is_ignored=options.ignores,
            )

    @property
    def not_judged(self) -> Collection[str]:
        """For each operation that could not be judged: why it is unknown whether it underflows."""
        return () if self._judge is None else list(self._judge.not_judged.values())

    def share_for(self, number: int) -> float | None:
        """The share that was asked for, if this batch is examined for underflows, else None."""
        is_due = number in self.traced if self.traced else number % EVERY == 0
        return self.share if is_due else None

    def __call__(
        self, finished: Finished, earlier: EarlierFrames, optimizer_step: int | None
    ) -> Finished:
        """Examine a batch that is due, in which nothing was found, and which is not closed yet.

        Args:
            finished: the batch.
            earlier: gives frames of earlier batches, if this one has too few.
            optimizer_step: steps made before; None if unknown.

        Returns:
            The batch, with what was found. A traced batch gets no report: detection is off.
        """
        batch = finished.batch
        assert self._judge is not None
        found = or_else(Finished(batch), self._judge, batch, earlier)
        if found.report is None:
            return finished
        report = replace(found.report, optimizer_step=optimizer_step)
        if self.traced:
            return replace(finished, flow=found.flow, seen=report)
        return replace(finished, flow=found.flow, report=report)
