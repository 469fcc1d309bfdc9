"""A backward whose gradients turned bad to its report: which operation did it, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import GRADIENT_OF, Fix, Origin
from fxguard.formats import LIMITS
from fxguard.graph.source_lines import source_of_trace
from fxguard.measure.at_hand import range_of
from fxguard.plan.plan import Plan, Step
from fxguard.ranks.agreement import current_rank
from fxguard.records import GRADIENT, Frame, Range, Row, Severity
from fxguard.report.report import Report
from fxguard.rerun.backward_evidence import BackwardEvidence, evidence_of_backward
from fxguard.rerun.gradients import BackwardOf, Gradients, gradients_of
from fxguard.verdict import origins
from fxguard.verdict.backward import (
    Suspect,
    cause_of_backward,
    limit_of_backward,
    outermost_factor,
    suspects_in,
)
from fxguard.verdict.fixes import fixes_for
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.operands import gradient_text, operands_text
from fxguard.verdict.report_of import EarlierFrames
from fxguard.verdict.surroundings import Surroundings

__all__ = ["BadLeaf", "ReportOfBackward"]

MOST_NAMES = 3  # of leaves


@dataclass(frozen=True, slots=True)
class BadLeaf:
    """A weight, or an input, whose gradient was bad."""

    name: str  # "weight fc.weight", "x"
    severity: Severity


@dataclass(frozen=True, slots=True)
class Backward:
    """A second run of the backward of one graph."""

    kept: KeptRun
    gradients: Gradients
    first: int = 0  # index of its first frame among those of the backward

    @property
    def plan(self) -> Plan:
        return self.kept.event.plan

    def step_of(self, operation: BackwardOf) -> tuple[int, Step] | None:
        """The operation as the plan knows it."""
        inside, name = operation.place
        for index, step in enumerate(self.plan.steps):
            if step.node == name and step.inside == inside and step.counts:
                return index, step
        return None

    def frame_of(self, operation: BackwardOf) -> Frame:
        """What came in and what it handed back."""
        known = self.step_of(operation)
        module = "" if known is None else self.kept.event.running_name(known[1].module)
        totals = self.gradients.totals
        came_in = [totals.get(value) for value in operation.made]
        labels = ["output"] if len(came_in) == 1 else [f"output[{i}]" for i in range(len(came_in))]
        rows = [_row(label, found) for label, found in zip(labels, came_in, strict=True)]
        rows += [_row(edge.label, edge.range) for edge in operation.edges]
        return Frame(
            name=module,
            kind=operation.call.kind,
            is_op=True,
            rows=tuple(rows),
            source=source_of_trace(operation.node.meta.get("stack_trace")),
            batch_number=self.kept.batch_number,
            index=self.first + list(reversed(self.gradients.operations)).index(operation),
            phase="backward",
        )

    def frames(self, up_to: BackwardOf | None) -> Iterator[Frame]:
        """In order of the backward, to an operation and with it; all of them where it is None."""
        for operation in reversed(self.gradients.operations):
            if operation is up_to or (
                any(edge.range is not None for edge in operation.edges) and self.step_of(operation)
            ):
                yield self.frame_of(operation)
            if operation is up_to:
                return


def _row(label: str, found: Range | None) -> Row:
    if found is None:
        return Row(GRADIENT + label, note="None")
    return Row(GRADIENT + label, found.abs_min, found.abs_max)


@dataclass(frozen=True, slots=True)
class Searched:
    """What a second run of the graphs of one backward has shown."""

    origins: tuple[Origin, ...]  # of the first bad gradients
    frames: tuple[Frame, ...]
    is_certain: bool  # whether every graph that matters ran again
    came_in: tuple[int, Severity] | None = None  # the output whose gradient came in bad


@dataclass(frozen=True, kw_only=True)
class ReportOfBackward:
    """Finds the operation whose backward made the first bad gradient, and describes it."""

    max_frames: int = 21  # of a report

    def __call__(
        self,
        kept: Sequence[KeptRun],
        leaves: Sequence[BadLeaf],
        earlier: EarlierFrames,
        *,
        has_gaps: bool = False,
        loss_scale: float | None = None,
    ) -> tuple[Report | None, tuple[Origin, ...]]:
        """The report on a backward that has ended.

        Args:
            kept: the runs of graphs that gradients came to, in the order of their forward.
            leaves: whose gradients were bad; one at least.
            earlier: the last frames of forward.
            has_gaps: whether operations ran between graphs, whose gradients nobody has seen.
            loss_scale: the scale of the loss, where somebody unscales gradients and skips steps.

        Returns:
            The report, or None where the scale alone is why gradients are bad: the step is
            skipped, and the operations that force it are notes.
        """
        found = search(kept, leaves)
        if has_gaps:
            found = replace(found, is_certain=False, came_in=None)
        if loss_scale is not None:
            if found.came_in is not None or not (found.origins or found.is_certain):
                return None, (_of_leaves(leaves, found),)
            unscaled = search(kept, leaves, loss_scale)
            if found.is_certain and unscaled.is_certain and not unscaled.origins:
                return None, found.origins or (_of_leaves(leaves, found),)
            found = unscaled
        origins = found.origins or (_of_leaves(leaves, found),)
        frames = [*found.frames, *([] if found.origins else [origins[0].frame])]
        frames = frames[-self.max_frames :]
        if len(frames) < self.max_frames:
            frames = earlier(self.max_frames - len(frames)) + frames
        report = Report(
            batch_number=kept[-1].batch_number if kept else 0,
            frames=tuple(frames),
            origins=origins,
            rank=current_rank(),
        )
        return report, ()


def search(kept: Sequence[KeptRun], leaves: Sequence[BadLeaf], scale: float = 1.0) -> Searched:
    """Run graphs and their backward again, the last one first, until one makes a bad gradient.

    Args:
        kept: the runs, in the order of their forward.
        leaves: whose gradients were bad.
        scale: what the gradients that came in are divided by.
    """
    frames: list[Frame] = []
    is_certain = bool(kept)
    came_in = None
    first = 0
    for run in reversed(kept):
        try:
            backward = Backward(run, gradients_of(run, scale), first)
        except Exception:  # whatever stops the second run, the report goes out
            is_certain = False
            continue
        gradients = backward.gradients
        starts = [v for v in gradients.arguments.values() if _is_bad(gradients.totals.get(v))]
        suspects = suspects_in(gradients, starts)
        frames += backward.frames(suspects[0].operation if suspects else None)
        first += len(gradients.operations)
        if suspects:
            origins = tuple(_origin(backward, suspect, leaves) for suspect in suspects)
            return Searched(origins, tuple(frames), is_certain)
        if starts and came_in is None and is_certain:
            came_in = next(_bad_incoming(run), None)
    return Searched((), tuple(frames), is_certain, came_in)


def _is_bad(found: Range | None) -> bool:
    return found is not None and bool(found.severity)


def _origin(backward: Backward, suspect: Suspect, leaves: Sequence[BadLeaf]) -> Origin:
    operation, edge = suspect.operation, suspect.edge
    names = [leaf.name.removeprefix("weight ") for leaf in leaves[:MOST_NAMES]]
    gradients = "the gradient" if len(leaves) == 1 else "the gradients"
    spread = (f"{gradients} of {names[0]}", *names[1:])
    if operation is None or edge is None:
        return _of_sum(backward, suspect, spread, len(leaves))
    frame = backward.frame_of(operation)
    origin = Origin(
        frame=frame,
        problem=suspect.severity.problem,
        what=operation.call.kind,
        row=GRADIENT + edge.label,
        spread=spread,
        spread_count=len(leaves),
    )
    nothing: BackwardEvidence | None = None
    seen = or_else(
        nothing, evidence_of_backward, backward.kept, backward.gradients, operation, edge
    )
    if seen is None:
        return origin
    factor = outermost_factor(backward.kept, backward.gradients, suspect)
    cause = or_else("unknown", cause_of_backward, seen, factor)
    detail = seen.detail
    return replace(
        origin,
        cause=cause,
        operands=or_else("", _operands, backward, seen, edge.label),
        dtype=seen.gradient.dtype,
        limit=LIMITS.get(seen.gradient.dtype),
        needed=seen.gradient.needed if suspect.severity is Severity.INF else None,
        fixes=_fixes(backward, seen.made_by or operation, cause, seen, factor),
        numel=detail.numel,
        nan_count=detail.nan_count,
        posinf_count=detail.posinf_count,
        neginf_count=detail.neginf_count,
        largest_finite=detail.largest_finite,
        first_index=detail.first_index,
        rows=detail.rows,
        row_count=detail.row_count,
    )


def _operands(backward: Backward, seen: BackwardEvidence, label: str) -> str:
    """The numbers at the bad element: of forward, where something was bad there already."""
    if seen.made_by is None or seen.forward is None:
        return gradient_text(seen.gradient, seen.came_in, label)
    frame = backward.frame_of(seen.made_by)
    where = "" if frame.source is None else f" ({frame.source.place})"
    problem = "NaN" if math.isnan(seen.forward.number) else "inf"
    return f"it read {problem} that {frame.kind}{where} made: {operands_text(seen.forward)}"


def _fixes(
    backward: Backward, operation: BackwardOf, cause: str, seen: BackwardEvidence, factor: float
) -> tuple[Fix, ...]:
    if cause == "loss scale":
        return (Fix("advice", _smaller_scale(seen, factor)),)
    known = backward.step_of(operation)
    if known is None or not known[1].outputs:
        return ()
    index, step = known
    blame = origins.Blame(step.outputs[0], index, Severity.NAN)
    around = Surroundings(backward.plan.steps, backward.plan.values, blame)
    nothing: tuple[Fix, ...] = ()
    return or_else(nothing, fixes_for, cause, seen.forward or seen.gradient, around)


def _smaller_scale(seen: BackwardEvidence, factor: float) -> str:
    """``a loss scale of 2**15 at most``."""
    needed = seen.gradient.needed
    assert needed is not None
    largest = math.floor(math.log2(limit_of_backward(seen) / needed * factor))
    return f"a loss scale of 2**{largest} at most, or bfloat16"


def _of_sum(backward: Backward, suspect: Suspect, spread: tuple[str, ...], count: int) -> Origin:
    """Finite gradients that have no finite sum."""
    makers = (o for o in backward.gradients.operations if suspect.summed in o.made)
    maker = next(makers, None)
    frame = Frame("", "sum of gradients", True, (), phase="backward")
    what = "gradient of an input of the graph"
    if maker is not None:
        frame = backward.frame_of(maker)
        what = f"gradient of the result of {frame.title.removesuffix(' (backward)')}"
    assert suspect.summed is not None
    if name := backward.gradients.weights.get(suspect.summed):
        what = f"gradient of weight {name}"
    return Origin(
        frame=frame,
        problem=suspect.severity.problem,
        what=what,
        row="grad of output",
        cause="overflow",
        operands="finite gradients come from several operations, and their sum is not finite",
        spread=spread,
        spread_count=count,
    )


def _of_leaves(leaves: Sequence[BadLeaf], found: Searched) -> Origin:
    """Where no operation can be accused."""
    if found.came_in is not None:
        position, severity = found.came_in
        what, label = "what the model returned", f"output[{position}]"
        kind, phase = "loss", "loss"
    else:
        severity, more = leaves[0].severity, len(leaves) - 1
        what = leaves[0].name + (f" and of {more} more" if more else "")
        label, kind, phase = leaves[0].name, "gradient", "backward"
    number = math.nan if severity is Severity.NAN else math.inf
    row = Row(GRADIENT + label, abs_min=number, abs_max=number)
    frame = Frame("", kind, True, (row,), phase=phase)
    return Origin(frame, severity.problem, GRADIENT_OF + what, row.label)


def _bad_incoming(kept: KeptRun) -> Iterator[tuple[int, Severity]]:
    for position, gradient in sorted(kept.incoming.items()):
        found = range_of(gradient)
        if isinstance(found, Range) and found.severity:
            yield position, found.severity
