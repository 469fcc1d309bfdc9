"""Reports on a backward whose gradients turned bad: which operation did it, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxguard.batch.kept_function import KeptFunction
from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.measure.at_hand import range_of
from fxguard.ranks.agreement import current_rank
from fxguard.ranks.gathering import Gather, nothing_gathered
from fxguard.records import GRADIENT, NOT_MEASURED, Frame, Range, Row, Severity
from fxguard.report.report import Report
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import suspects_in
from fxguard.verdict.backward_origins import (
    Backward,
    BadLeaf,
    origin_of,
    origin_of_function,
    origin_of_leaves,
    seen_of,
)
from fxguard.verdict.first_gradient import Began, FirstGradient, OnBackwardReport
from fxguard.verdict.first_origin import with_additions
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.loss_scale import factor_to_blame
from fxguard.verdict.report_of import EarlierFrames

__all__ = [
    "COMPILED",
    "GAPS",
    "NOT_KNOWN",
    "OUTSIDE",
    "Ended",
    "ReportOfBackward",
    "frames_of_backward",
]


NOT_KNOWN = "which operation made it is not known: "  # prefix of the operands of an origin

# Parts of a backward whose gradients nobody has seen.
GAPS = "operations between graphs did not run again"
OUTSIDE = "the backward went through no graph of the model"
COMPILED = "compiled autograd shows gradients of weights and inputs alone"


@dataclass(frozen=True, slots=True)
class Ended:
    """The known facts about a backward that has ended."""

    kept: Sequence[KeptRun]  # graph runs that gradients reached, in the order of their forward
    leaves: Sequence[BadLeaf]  # leaves with bad gradients
    unseen: str = ""  # the part whose gradients nobody has seen, such as :data:`GAPS`
    functions: Sequence[KeptFunction] = ()  # outside graphs, in the order of the backward


@dataclass(frozen=True, slots=True)
class Searched:
    """The findings of a second run of the graphs of one backward."""

    origins: tuple[Origin, ...]  # of the first bad gradients
    frames: tuple[Frame, ...]
    is_certain: bool  # whether every relevant graph ran again
    came_in: tuple[int, Severity] | None = None  # the output whose incoming gradient was bad
    not_searched: str = ""  # why a graph did not run again, beginning with the last
    operations: int = 0  # in the graphs that ran again
    first: Began | None = None  # where the first origin began
    most: float = 0.0  # the largest finite gradient of the graphs' inputs


@dataclass(frozen=True, kw_only=True)
class ReportOfBackward:
    """Finds the operation whose backward made the first bad gradient, and describes it."""

    max_frames: int = 21  # of a report
    gather: Gather = nothing_gathered  # gathers weights that a second run reads
    additions: Sequence[OnBackwardReport] = ()  # of tools

    def __call__(
        self,
        ended: Ended,
        earlier: EarlierFrames,
        *,
        batch_number: int,
        loss_scale: float | None = None,
    ) -> tuple[Report | None, tuple[Origin, ...]]:
        """Report on a backward that has ended.

        Args:
            ended: the backward, with at least one bad leaf.
            earlier: the last frames of the forward.
            batch_number: number of the batch of the report.
            loss_scale: the scale of the loss, if gradients are unscaled and bad steps are skipped.

        Returns:
            The report, or None if only the scale makes gradients bad: then the step is skipped, and
            the operations that overflow are notes.
        """
        kept, leaves = ended.kept, ended.leaves
        found = search(kept, leaves, self.gather)
        if ended.unseen:
            stopped = found.not_searched or ended.unseen
            found = replace(found, is_certain=False, came_in=None, not_searched=stopped)
        if loss_scale is not None:
            if found.came_in is not None or not (found.origins or found.is_certain):
                return None, (_origin_elsewhere(ended, found, batch_number),)
            unscaled = search(kept, leaves, self.gather, loss_scale)
            is_certain = found.is_certain and unscaled.is_certain
            if not unscaled.origins and (found.origins or is_certain):
                return None, found.origins or (_origin_elsewhere(ended, found, batch_number),)
            found = unscaled
        origins, frames = found.origins, list(found.frames)
        if not origins:
            origins = (_origin_elsewhere(ended, found, batch_number),)
            # Frames that show a bad gradient came after it.
            before = itertools.takewhile(lambda frame: not _shows_bad(frame), frames)
            frames = [*before, origins[0].frame]
        frames = frames[-self.max_frames :]
        if len(frames) < self.max_frames:
            frames = earlier(self.max_frames - len(frames)) + frames
        report = Report(
            batch_number=batch_number,
            frames=tuple(frames),
            origins=origins,
            rank=current_rank(),
        )
        first = FirstGradient(
            origin=origins[0],
            kept=kept,
            began=found.first,
            was_healthy=found.is_certain and found.came_in is None and not ended.functions,
            most=found.most,
            loss_scale=loss_scale,
            gather=self.gather,
        )
        return with_additions(report, first, self.additions), ()


def _origin_elsewhere(ended: Ended, found: Searched, batch_number: int) -> Origin:
    """An origin outside the graphs that ran again."""
    for function in ended.functions:
        origin = origin_of_function(function, ended.leaves)
        if origin is not None:
            return origin
    origin = origin_of_leaves(ended.leaves, found.came_in, batch_number)
    if found.came_in is not None or not found.not_searched:
        return origin
    return replace(origin, operands=NOT_KNOWN + found.not_searched)


def frames_of_backward(kept: Sequence[KeptRun]) -> list[Frame]:
    """All frames of a backward, in order; a graph that cannot run again has one frame to say so.

    Args:
        kept: the graph runs that gradients reached, in the order of their forward.
    """
    frames: list[Frame] = []
    for run in reversed(kept):
        try:
            frames += Backward(run, gradients_of(run), len(frames)).frames(None)
        except Exception as error:  # the trace shows what stopped it
            row = Row(GRADIENT + "output", note=f"{NOT_MEASURED}: {_in_one_line(error)}")
            number = run.batch_number
            frames.append(
                Frame("", "graph", True, (row,), None, number, len(frames), phase="backward")
            )
    return frames


def search(
    kept: Sequence[KeptRun],
    leaves: Sequence[BadLeaf],
    gather: Gather,
    scale: float | None = None,
) -> Searched:
    """Run graphs and their backward again, from the last one on, until one makes a bad gradient.

    Args:
        kept: the runs, in the order of their forward.
        leaves: leaves with bad gradients.
        gather: gathers weights that were freed since.
        scale: the known loss scale, a divisor for the incoming gradients; None for none.
    """
    found = Searched((), (), is_certain=not all(run.of_tape for run in kept))
    for run in reversed(kept):
        try:
            with gather(run.freed_weights()):
                found = _search_in(run, found, leaves, scale)
        except Exception as error:  # whatever stops the second run, the report still goes out
            why = found.not_searched or _in_one_line(error)
            found = replace(found, not_searched=why, is_certain=found.is_certain and run.of_tape)
        if found.origins:
            break
    return found


def _search_in(
    run: KeptRun, before: Searched, leaves: Sequence[BadLeaf], scale: float | None
) -> Searched:
    """The same with one more run."""
    divisor = scale or 1.0
    backward = Backward(run, gradients_of(run, divisor), before.operations, scale)
    gradients = backward.gradients
    starts = [v for v in gradients.arguments.values() if _is_bad(gradients.totals.get(v))]
    suspects = suspects_in(gradients, starts)
    came_in = None if suspects else before.came_in
    if starts and not suspects and came_in is None and before.is_certain:
        came_in = next(_bad_incoming(run), None)
    frames = backward.frames(suspects[0].operation if suspects else None)
    seen = [seen_of(backward, suspect) for suspect in suspects]
    factors = [
        or_else(1.0, factor_to_blame, run, gradients, suspect, each, scale)
        for suspect, each in zip(suspects, seen, strict=True)
    ]
    totals = [gradients.totals[v] for v in gradients.arguments.values() if v in gradients.totals]
    finite = [found.abs_max for found in totals if not found.severity]
    return replace(
        before,
        origins=tuple(
            origin_of(backward, suspect, leaves, each, factor)
            for suspect, each, factor in zip(suspects, seen, factors, strict=True)
        ),
        first=Began(run, gradients, suspects[0], seen[0], divisor, factors[0])
        if suspects
        else None,
        most=max([before.most, *finite]),
        frames=(*before.frames, *frames),
        operations=before.operations + len(gradients.operations),
        came_in=came_in,
    )


def _shows_bad(frame: Frame) -> bool:
    return any(row.is_bad for row in frame.rows)


def _in_one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_bad(found: Range | None) -> bool:
    return found is not None and bool(found.severity)


def _bad_incoming(kept: KeptRun) -> Iterator[tuple[int, Severity]]:
    for position, gradient in sorted(kept.incoming.items()):
        found = range_of(gradient)
        if isinstance(found, Range) and found.severity:
            yield position, found.severity
