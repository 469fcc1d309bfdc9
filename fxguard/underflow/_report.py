"""Reports operations that made numbers 0 because their dtype cannot hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from fxguard.advice.causes import lost_eps
from fxguard.advice.operands import operands_text
from fxguard.batch.assemble import assemble
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, UncapturedOperation
from fxguard.batch.frames import FrameView
from fxguard.batch.keys import Key
from fxguard.findings import Fix, Origin
from fxguard.forgiving import or_else
from fxguard.formats import FORMATS
from fxguard.graph.poles import PRODUCTS, plain
from fxguard.graph.tables import CASTS
from fxguard.plan.blame import Blame
from fxguard.plan.plan import WHOLE_GRAPH, Place, Step
from fxguard.ranks.agreement import current_rank
from fxguard.records import Severity
from fxguard.report.report import Report
from fxguard.rerun.details import numbers_inside
from fxguard.rerun.whole_graph import measure_postponed
from fxguard.underflow._between_graphs import LostBetween
from fxguard.underflow.lost import KEEPS_ZEROS, Lost
from fxguard.underflow.lost_elements import lost_elements_in
from fxguard.verdict.description import position_of
from fxguard.verdict.report_of import EarlierFrames, Finished, last_frames

__all__ = ["ReportOfUnderflow"]

BETWEEN = "written in place between graphs"
CHANGED = "a second run of the graph did not repeat it"

_OF_FACTORS = PRODUCTS | {"mul", "div"}  # a factor of an operand is a factor of the result


@dataclass(frozen=True, kw_only=True)
class ReportOfUnderflow:
    """Looks for operations that underflow, in a batch with no other findings.

    Threads may share it: ``not_judged`` grows by single operations on a dict.
    """

    share: float  # of elements that are not 0 in float64 but 0 in the dtype
    view: FrameView  # which frames a report shows
    max_frames: int = 21  # of a report
    is_ignored: Callable[[Step], bool] = lambda step: False  # whether it must not be reported
    # Operations that could not be judged, and why.
    not_judged: dict[Hashable, str] = field(default_factory=dict)

    def __call__(self, batch: Batch, earlier: EarlierFrames) -> Finished:
        """Examine a batch that was read and is not closed yet.

        Args:
            batch: the batch.
            earlier: gives frames if this batch has too few.
        """
        found = list(self._found_in(batch))
        if not found:
            return Finished(batch)
        measure_postponed(batch)
        flow = assemble(batch, numbers_inside)
        makers = {v: i for i, s in enumerate(flow.steps) if s.counts for v in s.outputs}
        blames: dict[Blame, Lost] = {}
        for key, lost in found:
            made = flow.place[key]
            step = makers.get(made)
            if step is None or flow.steps[step].kind == WHOLE_GRAPH:
                self.not_judged[key] = CHANGED
            elif not self.is_ignored(flow.steps[step]):
                flow.show_step(step)
                blames[Blame(made, step, Severity.FINITE)] = lost
        if not blames:
            return Finished(batch)
        first = min(position_of(flow, self.view, blame) for blame in blames)
        report = Report(
            batch_number=batch.number,
            frames=last_frames(self.view, flow, first, self.max_frames, earlier),
            origins=tuple(self._origin(flow, blame, lost) for blame, lost in blames.items()),
            rank=current_rank(),
        )
        return Finished(batch, flow, report)

    def _found_in(self, batch: Batch) -> Iterator[tuple[Key, Lost]]:
        """The losses of operations, by the values that they made, in order of execution."""
        for index, event in enumerate(batch.events):
            if isinstance(event, GraphRun):
                yield from self._found_in_graph(index, event)
            elif isinstance(event, UncapturedOperation) and event.counts:
                yield from self._found_between(batch, event)

    def _found_in_graph(self, index: int, run: GraphRun) -> Iterator[tuple[Key, Lost]]:
        lost = lost_elements_in(run, self.share)
        for place, reason in lost.not_judged.items():
            self.not_judged[run.names[1], place] = reason
        steps: dict[Place, Step] = {}
        for step in run.plan.steps:
            if step.outputs and (step.counts or (step.inside, step.node) not in steps):
                steps[step.inside, step.node] = step
        for place, each in lost.found.items():
            yield Key(index, steps[place].outputs[0]), each

    def _found_between(
        self, batch: Batch, event: UncapturedOperation
    ) -> Iterator[tuple[Key, Lost]]:
        notes = batch.watcher(LostBetween)
        for _, key in event.outputs[:1]:
            lost = "" if notes is None else notes.lost.get(key, "")
            if isinstance(lost, Lost):
                yield key, lost
            elif lost or (lost == "" and self._made_zeros(batch, event)):
                self.not_judged[event.module, event.kind, event.place] = lost or BETWEEN

    @staticmethod
    def _made_zeros(batch: Batch, event: UncapturedOperation) -> bool:
        """Whether an unexamined operation made a 0 from anything."""
        if batch.between is None or not event.inputs or event.kind in KEEPS_ZEROS:
            return False
        return any(float(batch.between[key.value, 0]) == 0 for _, key in event.outputs)

    def _origin(self, flow: DataFlow, blame: Blame, lost: Lost) -> Origin:
        """The origin for an operation and its loss."""
        assert blame.step is not None
        step, position = flow.steps[blame.step], position_of(flow, self.view, blame)
        index = sum(shown < position for shown in self.view.shown(flow))
        rows = flow.frames[position].rows
        label = next((row.label for row in rows if row.value == blame.value), "output")
        return Origin(
            frame=self.view.render(flow, position, index),
            problem="underflow",
            what=step.kind,
            row=label,
            numel=lost.evidence.numel,
            first_index=lost.evidence.index,
            dtype=lost.evidence.dtype,
            cause="underflow",
            operands=or_else("", operands_text, lost.evidence),
            lost_share=lost.share,
            largest_lost=lost.largest,
            fixes=_fixes(step, lost),
        )


def _fixes(step: Step, lost: Lost) -> tuple[Fix, ...]:
    """What to do about an underflow: an eps that the dtype can hold, another dtype, a scale."""
    name, dtype, largest = plain(step.kind), lost.evidence.dtype, lost.largest
    texts = []
    eps = lost_eps(lost.evidence)
    if eps is not None and name not in _OF_FACTORS:
        near_zero = "1e-4" if dtype == "float16" else "1e-12"
        texts.append(
            f"take a number that {dtype} holds, {near_zero}: {eps:.0e} in {name} is 0 there"
        )
    wider = [each for each in ("bfloat16", "float32") if largest >= FORMATS[each].smallest_normal]
    others = " or ".join(each for each in wider if each != dtype)
    held = FORMATS[dtype].smallest if dtype in FORMATS else 0.0
    why = f"{largest:.1g} is 0 in {dtype}" if largest < held else f"a number inside of {name} is 0"
    if others and step.kind in CASTS:
        texts.append(f"cast to {others} here, or not at all: {why}")
    elif others:
        where = f"`{step.module}`" if step.module else f"this {name}"
        texts.append(f"keep {where} in {others}: {why}")
    if name in _OF_FACTORS and dtype in FORMATS:
        exponent = math.ceil(math.log2(FORMATS[dtype].smallest_normal / largest))
        texts.append(f"scale what it reads by 2**{exponent}, and divide by that where it fits")
    if not others:
        texts.append(f"work with logarithms, or in float64: {dtype} holds nothing so small")
    return tuple(Fix("advice", text) for text in texts)
