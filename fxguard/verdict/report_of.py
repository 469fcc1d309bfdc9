"""Makes the report on a batch: judges it, and puts together what is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxguard.batch.assemble import assemble, reached_by_failure
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.frames import FrameView
from fxguard.findings import Growth, Origin
from fxguard.measure.details import Detail
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step as PlannedStep
from fxguard.ranks.agreement import current_rank
from fxguard.records import Frame
from fxguard.report.report import Report
from fxguard.rerun.details import numbers_inside
from fxguard.rerun.whole_graph import measure_postponed
from fxguard.verdict import origins as cause
from fxguard.verdict.description import Description, position_of
from fxguard.verdict.first_origin import FirstOrigin, OnReport, with_additions
from fxguard.verdict.judge import Judgment, answer
from fxguard.verdict.precedents import Precedents
from fxguard.verdict.second_opinion import SecondOpinion

__all__ = [
    "EarlierFrames",
    "Finished",
    "Judge",
    "ReportOf",
    "filled",
    "glance",
    "last_frames",
]


# Gives the last frames of earlier batches, at most as many as asked for.
EarlierFrames = Callable[[int], list[Frame]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A closed batch and the result of its judgment. Neither changes any more."""

    batch: Batch
    # As it was judged, of a traced batch at a glance; None if nothing was reported.
    flow: DataFlow | None = None
    report: Report | None = None
    absorbed: tuple[Origin, ...] = ()  # origins whose bad values reach no output
    # The would-be report on a traced batch, for which detection is off.
    seen: Report | None = None
    first_bad: Frame | None = None  # of a traced batch: what first made an inf or a NaN


# Judges a batch that was read and is not closed yet, given what its forward raised, if anything.
Judge = Callable[[Batch, Exception | None, EarlierFrames], Finished]


@dataclass(frozen=True, kw_only=True)
class ReportOf:
    """Judges batches of one model. Threads may share it.

    Example:
        >>> judge = ReportOf(view=FrameView(model), is_ignored=options.ignores)
        >>> judge(batch, None, lambda wanted: []).report is None  # it is healthy
        True
    """

    view: FrameView  # which frames a report shows
    max_frames: int = 21  # of a report
    strict: bool = False  # whether absorbed origins are reported as well
    is_ignored: Callable[[PlannedStep], bool] = lambda step: (
        False
    )  # whether it must not be reported
    growth: Callable[[], tuple[Growth, ...]] = tuple  # weights that have grown beyond reason
    additions: Sequence[OnReport] = ()  # of tools
    # Grows by single operations on dicts. If two threads see a new kind of batch at the same time,
    # both judge it.
    precedents: Precedents = field(default_factory=Precedents)

    def __call__(self, batch: Batch, error: Exception | None, earlier: EarlierFrames) -> Finished:
        """Judge a batch that was read and is not closed yet.

        Args:
            batch: the batch.
            error: what its forward raised; None if it returned.
            earlier: see :data:`EarlierFrames`; called if this batch has too few frames.
        """
        case = None
        if error is None:  # if it raised, a finite batch is judged as well
            if batch.is_finite():
                return Finished(batch)
            case = self.precedents.case_of(batch)
            if self.precedents.match(case, batch, lambda question: answer(batch, question)):
                return Finished(batch)
        measure_postponed(batch)
        flow = assemble(batch, numbers_inside)
        if error is not None:
            flow.reached += reached_by_failure(flow, batch)
        judgment = Judgment(batch, flow, self.is_ignored)
        opinion = SecondOpinion(batch, flow, judgment.verdict)
        judgment.verdict = verdict = opinion.verdict
        judgment.details = {**opinion.details, **judgment.details}
        flow.intended = verdict.intended
        for blame in verdict.both:
            if blame.step is not None:
                flow.show_step(blame.step)
        describe = Description(judgment, opinion, self.view)
        # Without all operations nobody knows what reached no output.
        noted = _apart_from(verdict.origins, verdict.absorbed) if batch.holds_all else ()
        absorbed = tuple(map(describe.noted, noted))
        known = {flow.place[key] for key in batch.judged_before}
        accused = [
            blame
            for blame in (verdict.both if self.strict else verdict.origins)
            if known.isdisjoint(_came_of(flow, verdict, blame))
        ]
        if not accused:
            if opinion.lasts:
                self.precedents.add(case, judgment.conditions())
            return Finished(batch, absorbed=absorbed)
        first = min(map(describe.position, accused))
        model = self.view.model
        origins = _once_each(map(describe.explained, accused))
        first_origin = FirstOrigin(
            batch=batch,
            flow=flow,
            blame=accused[0],
            origin=origins[0],
            evidence=opinion.evidence(accused[0]),
            operation=opinion.operation(accused[0]),
            eager=opinion.eager.get(accused[0].value),
        )
        report = Report(
            batch_number=batch.number,
            frames=last_frames(self.view, flow, first, self.max_frames, earlier),
            origins=origins,
            rank=current_rank(),
            absorbed=() if self.strict else absorbed,
            error="" if error is None else _one_line(error),
            weights=0 if model is None else len(list(model.parameters())),
            buffers=0 if model is None else len(list(model.buffers())),
            grown=self.growth(),
            repeated=batch.repeated,
        )
        report = with_additions(report, first_origin, self.additions)
        return Finished(batch, flow, report, absorbed)


def _apart_from(origins: Sequence[Blame], absorbed: Sequence[Blame]) -> Iterator[Blame]:
    """What reached no output, without other results of operations that are blamed anyway."""
    told = {blame.step for blame in origins if blame.step is not None}
    return (blame for blame in absorbed if blame.step not in told)


def last_frames(
    view: FrameView, flow: DataFlow, position: int, wanted: int, earlier: EarlierFrames
) -> tuple[Frame, ...]:
    """The last frames up to and including one; earlier batches fill up a short batch.

    Args:
        view: which frames are shown.
        flow: the data flow of the batch.
        position: index of the last frame in ``flow.frames``.
        wanted: the maximum number of frames.
        earlier: see :data:`EarlierFrames`.
    """
    frames = [*itertools.islice(view.in_reverse(flow, position), wanted)][::-1]
    return filled(frames, wanted, earlier)


def filled(frames: Sequence[Frame], wanted: int, earlier: EarlierFrames) -> tuple[Frame, ...]:
    """The last of some frames, and of those before them if there are too few.

    Args:
        frames: frames in order.
        wanted: the maximum number of frames.
        earlier: see :data:`EarlierFrames`.
    """
    missing = wanted - len(frames)
    return (*(earlier(missing) if missing > 0 else ()), *frames[-wanted:])


class _Glance(Judgment):
    """A judgment that runs nothing again."""

    def turned_infinite(self, value: int) -> bool | None:
        """Unknown."""
        return None

    def detail(self, blame: Blame) -> Detail | None:
        """Unknown."""
        return None


def glance(batch: Batch, view: FrameView) -> tuple[DataFlow, Frame | None]:
    """What a batch that is not closed yet did, without running anything again.

    Args:
        batch: a batch that was read, and measured if that was postponed.
        view: the frames that are shown.

    Returns:
        Its data flow, with the infinities that are intended; and the frame of its first origin, or
        None if it has none.
    """
    flow = assemble(batch)
    if batch.is_finite():
        return flow, None
    verdict = _Glance(batch, flow, lambda step: False).verdict
    flow.intended = verdict.intended
    positions = [position_of(flow, view, blame) for blame in verdict.origins]
    return flow, view.render(flow, min(positions), 0) if positions else None


def _came_of(flow: DataFlow, verdict: cause.Verdict, blame: Blame) -> Iterator[int]:
    """The value of an origin, and the bad values that it came from."""
    yield blame.value
    for value in () if blame.step is None else flow.steps[blame.step].inputs:
        yield from (source.value for source in verdict.sources.get(value, ()))


def _once_each(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Merge equal origins: a value that several graphs of a batch read is one origin."""
    unique: dict[object, Origin] = {}
    for origin in origins:
        is_one = origin.standing or origin.what.startswith("argument ")
        unique.setdefault(origin.what if is_one else origin, origin)
    return tuple(unique.values())


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
