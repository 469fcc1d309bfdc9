"""Reports on a backward whose gradients turned bad: which operation did it, and why."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxguard.batch.kept_function import KeptFunction
from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.forgiving import or_else, theirs
from fxguard.measure.at_hand import range_of
from fxguard.plan.plan import Step
from fxguard.ranks.agreement import current_rank
from fxguard.ranks.gathering import Gather, nothing_gathered
from fxguard.records import GRADIENT, NOT_MEASURED, Frame, Range, Row, Severity, Source
from fxguard.report.report import Report
from fxguard.rerun.backward_flow import BackwardFlow, came_from
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import origins_of
from fxguard.verdict.backward_origins import (
    BadLeaf,
    Description,
    origin_at,
    origin_of_function,
    origin_of_leaves,
    seen_of,
)
from fxguard.verdict.first_gradient import Began, FirstGradient, OnBackwardReport
from fxguard.verdict.first_origin import with_additions
from fxguard.verdict.loss_scale import factor_to_blame
from fxguard.verdict.origins import Verdict
from fxguard.verdict.report_of import EarlierFrames, filled
from fxguard.verdict.second_derivative import origin_of_second_derivative

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
    passes_on: bool = False  # whether only leaves of other models have bad gradients
    set_at: Source | None = None  # the script's line that gave the leaves their gradients
    differentiated: Sequence[KeptRun] = ()  # earlier ones whose own backward is differentiated


@dataclass(frozen=True, slots=True)
class Searched:
    """The findings of a second run of the graphs of one backward."""

    is_certain: bool  # whether every relevant graph ran again
    flows: tuple[BackwardFlow, ...] = ()  # of the graphs that did, the last first
    origins: tuple[Origin, ...] = ()  # of the first bad gradients
    first: Began | None = None  # where the first of them began
    came_in: tuple[int, Severity] | None = None  # the output whose incoming gradient was bad
    not_searched: str = ""  # why a graph did not run again, beginning with the last
    is_ignored: bool = False  # whether an operation that the user ignores made a gradient bad

    @property
    def frames(self) -> list[Frame]:
        """The frames of these graphs, up to that of the first origin."""
        if self.first is None:
            return [frame for each in self.flows for frame in each.frames(None)]
        *before, last = self.flows
        frames = [frame for each in before for frame in each.frames(None)]
        return frames + last.frames(self.first.blame.step)

    @property
    def most(self) -> float:
        """The largest finite gradient of the graphs' inputs."""
        found = [each.range_of(value) for each in self.flows for value in each.flow.reached]
        finite = [each.abs_max for each in found if each is not None and not each.severity]
        return max(finite, default=0.0)


@dataclass(frozen=True, kw_only=True)
class ReportOfBackward:
    """Finds the operation whose backward made the first bad gradient, and describes it."""

    max_frames: int = 21  # of a report
    is_ignored: Callable[[Step], bool] = lambda step: False  # whether it must not be reported
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
            ended: the backward, with at least one bad leaf, or one that passed gradients on.
            earlier: the last frames of the forward.
            batch_number: number of the batch of the report.
            loss_scale: the scale of the loss, if gradients are unscaled and bad steps are skipped.

        Returns:
            The report, or None if there is nothing to report: only operations that the user ignores
            made gradients bad, or only the scale did. In the latter case the step is skipped, and
            the operations that overflow are notes.
        """
        found = self.search(ended, None)
        if loss_scale is not None:
            if found.came_in is not None or not (found.origins or found.is_certain):
                return None, (_origin_elsewhere(ended, found, batch_number),)
            unscaled = self.search(ended, loss_scale)
            is_certain = found.is_certain and unscaled.is_certain
            if not unscaled.origins and (found.origins or is_certain):
                return None, found.origins or (_origin_elsewhere(ended, found, batch_number),)
            found = unscaled
        is_known = bool(found.origins) or found.came_in is not None or bool(found.not_searched)
        if found.is_ignored and not is_known:
            return None, ()
        origins, frames = found.origins, found.frames
        if ended.passes_on and not origins:
            return None, ()
        if not origins:
            origins = (_origin_elsewhere(ended, found, batch_number),)
            # Frames that show a bad gradient came after it.
            before = itertools.takewhile(lambda frame: not _shows_bad(frame), frames)
            frames = [*before, origins[0].frame]
        first = FirstGradient(
            origin=origins[0],
            kept=ended.kept,
            began=found.first,
            was_healthy=found.is_certain and found.came_in is None and not ended.functions,
            most=found.most,
            loss_scale=loss_scale,
            gather=self.gather,
        )
        report = Report(
            batch_number=batch_number,
            frames=filled(frames, self.max_frames, earlier),
            origins=origins,
            rank=current_rank(),
        )
        return with_additions(report, first, self.additions), ()

    def search(self, ended: Ended, scale: float | None) -> Searched:
        """Run graphs and their backward again, from the last on, until one makes a bad gradient.

        Args:
            ended: the backward.
            scale: the known loss scale, a divisor for the incoming gradients; None for none.
        """
        found = Searched(is_certain=not all(run.of_tape for run in ended.kept))
        for run in reversed(ended.kept):
            try:
                with self.gather(run.freed_weights()):
                    found = self._search_in(run, found, ended.leaves, scale)
            except theirs() as error:  # whatever stops the second run, the report still goes out
                why = found.not_searched or _in_one_line(error)
                is_certain = found.is_certain and run.of_tape
                found = replace(found, not_searched=why, is_certain=is_certain)
            if found.origins:
                break
        if ended.unseen:
            why = found.not_searched or ended.unseen
            found = replace(found, is_certain=False, came_in=None, not_searched=why)
        return (
            found
            if found.origins
            else replace(found, came_in=_from_outside(ended.kept) or found.came_in)
        )

    def _search_in(
        self, run: KeptRun, before: Searched, leaves: Sequence[BadLeaf], scale: float | None
    ) -> Searched:
        """The same with one more run."""
        divisor = scale or 1.0
        backward = BackwardFlow(run, gradients_of(run, divisor))
        verdict = origins_of(backward, is_ignored=self.is_ignored)
        found = replace(before, flows=(*before.flows, backward))
        accused = [blame for blame in verdict.origins if blame.step is not None]
        if not accused:
            is_ignored = any(not verdict.sources.get(x, True) for x in backward.flow.reached)
            return replace(
                found,
                came_in=before.came_in or _came_in(backward, verdict, before),
                is_ignored=before.is_ignored or is_ignored,
            )
        seen = [seen_of(backward, blame, scale) for blame in accused]
        factors = [
            or_else(1.0, factor_to_blame, backward, blame, each, scale)
            for blame, each in zip(accused, seen, strict=True)
        ]
        beyond = functools.partial(came_from, found.flows)
        describe = Description(backward, verdict, leaves, scale, beyond)
        return replace(
            found,
            origins=tuple(map(describe.origin, accused, seen, factors)),
            first=Began(backward, accused[0], seen[0], divisor, factors[0]),
            came_in=None,
        )


def _came_in(
    backward: BackwardFlow, verdict: Verdict, before: Searched
) -> tuple[int, Severity] | None:
    """The output of the model whose incoming gradient was bad, if every later graph ran again."""
    values = {value: position for position, value in backward.came_in.items()}
    found = [(values[blame.value], blame.severity) for blame in verdict.origins]
    return found[0] if found and before.is_certain else None


def _from_outside(kept: Sequence[KeptRun]) -> tuple[int, Severity] | None:
    """The same, if nothing but what the script does with the output can have made it bad."""
    for run in reversed(kept):
        for position in sorted(run.incoming.keys() & set(run.returned)):
            found = range_of(run.incoming[position])
            if isinstance(found, Range) and found.severity:
                return position, found.severity
    return None


def _origin_elsewhere(ended: Ended, found: Searched, batch_number: int) -> Origin:
    """An origin outside the graphs that ran again."""
    for function in ended.functions:
        origin = origin_of_function(function, ended.leaves)
        if origin is not None:
            return origin
    origin = origin_of_leaves(ended.leaves, found.came_in, batch_number)
    if ended.set_at is not None:
        return origin_at(origin, ended.set_at)
    if found.came_in is not None:
        return origin
    told = origin_of_second_derivative(origin, ended.differentiated)
    if told is not origin or not found.not_searched:
        return told
    return replace(origin, operands=NOT_KNOWN + found.not_searched)


def frames_of_backward(kept: Sequence[KeptRun]) -> list[Frame]:
    """All frames of a backward, in order; a graph that cannot run again has one frame to say so.

    Args:
        kept: the graph runs that gradients reached, in the order of their forward.
    """
    frames: list[Frame] = []
    for run in reversed(kept):
        try:
            found = BackwardFlow(run, gradients_of(run)).frames(None)
            frames += [replace(frame, index=len(frames) + frame.index) for frame in found]
        except theirs() as error:  # the trace shows what stopped it
            row = Row(GRADIENT + "output", note=f"{NOT_MEASURED}: {_in_one_line(error)}")
            number = run.batch_number
            frames.append(
                Frame("", "graph", True, (row,), None, number, len(frames), phase="backward")
            )
    return frames


def _shows_bad(frame: Frame) -> bool:
    return any(row.is_bad for row in frame.rows)


def _in_one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
