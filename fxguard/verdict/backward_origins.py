"""Describes for the user where a bad gradient began: origins, and frames of the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxguard.advice.case import Case
from fxguard.advice.causes import cause_of
from fxguard.advice.fixes import fixes_for
from fxguard.advice.operands import gradient_text, operands_text
from fxguard.advice.signs import is_chosen_after
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.words import degeneracy_in_words, words_for
from fxguard.batch.dataflow import joined
from fxguard.batch.kept_function import KeptFunction
from fxguard.batch.kept_run import KeptRun
from fxguard.findings import GRADIENT_OF, Fix, Origin
from fxguard.formats import LIMITS
from fxguard.graph.poles import plain
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Place, Step
from fxguard.records import GRADIENT, Frame, Range, Row, Severity
from fxguard.rerun.backward_evidence import BackwardEvidence, evidence_of_backward
from fxguard.rerun.edges import BackwardOf, Gradients
from fxguard.source.lines import source_of_trace
from fxguard.verdict.backward import (
    Suspect,
    cause_of_backward,
    is_of_small_operand,
)
from fxguard.verdict.explain import with_counts
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.loss_scale import fix_of_factor

__all__ = [
    "Backward",
    "BadLeaf",
    "origin_of",
    "origin_of_function",
    "origin_of_leaves",
    "seen_of",
]

MOST_NAMES = 3  # of leaves


@dataclass(frozen=True, slots=True)
class BadLeaf:
    """A weight or an input whose gradient was bad."""

    name: str  # "weight fc.weight", "x"
    severity: Severity


class Backward:
    """A second run of the backward of one graph: its operations and their frames.

    Args:
        kept: the graph run.
        gradients: the gradients of the second run.
        first: index of its first frame among those of the whole backward.
        scale: the known loss scale, which that run has divided out; None if unknown.
    """

    def __init__(
        self, kept: KeptRun, gradients: Gradients, first: int = 0, scale: float | None = None
    ) -> None:
        self.kept = kept
        self.scale = scale
        self.gradients = gradients
        self.plan = kept.event.plan
        # In order of the backward, with the indices of their frames.
        self.order = {each: first + i for i, each in enumerate(reversed(gradients.operations))}
        self._steps: dict[Place, tuple[int, Step]] = {}
        for index, step in enumerate(self.plan.steps):
            if step.counts:
                self._steps[step.inside, step.node] = index, step
            for depth, (name, _) in enumerate(step.inside):  # operations in bodies are included
                self._steps.setdefault((step.inside[:depth], name), (index, step))

    def step_of(self, operation: BackwardOf) -> tuple[int, Step] | None:
        """The operation's step in the plan."""
        return self._steps.get(operation.place)

    def frame_of(self, operation: BackwardOf) -> Frame:
        """The frame of an operation: its incoming and returned gradients."""
        known = self.step_of(operation)
        module = "" if known is None else self._name_of(known[1])
        made, gradients = operation.made, self.gradients
        labels = ["output"] if len(made) == 1 else [f"output[{i}]" for i in range(len(made))]
        came_in = [(x, y, gradients.totals.get(y)) for x, y in zip(labels, made, strict=True)]
        handed_back = [(edge.label, edge.value, edge.range) for edge in operation.edges]
        rows = [
            _row(label, found, gradients.dtypes.get(value, ""))
            for label, value, found in (*came_in, *handed_back)
        ]
        return Frame(
            name=module,
            kind=operation.call.kind,
            is_op=True,
            rows=tuple(rows),
            source=source_of_trace(operation.node.meta.get("stack_trace")),
            batch_number=self.kept.batch_number,
            index=self.order[operation],
            phase="backward",
        )

    def _name_of(self, step: Step) -> str:
        run = self.kept.event
        return joined(run.held_as, run.running_name(step.module))

    def frames(self, up_to: BackwardOf | None) -> Iterator[Frame]:
        """Frames in order of the backward, up to and including an operation; all if it is None."""
        for operation in self.order:
            if operation is up_to or (
                any(edge.range is not None for edge in operation.edges) and self.step_of(operation)
            ):
                yield self.frame_of(operation)
            if operation is up_to:
                return


def _row(label: str, found: Range | None, dtype: str) -> Row:
    if found is None:
        return Row(GRADIENT + label, note="None")
    return Row(GRADIENT + label, found.abs_min, found.abs_max, dtype=dtype)


def seen_of(backward: Backward, suspect: Suspect) -> BackwardEvidence | None:
    """A closer look at where a bad gradient began; None if that is impossible."""
    operation, edge = suspect.operation, suspect.edge
    if operation is None or edge is None:
        return None
    nothing: BackwardEvidence | None = None
    kept, gradients = backward.kept, backward.gradients
    scale = backward.scale or 1.0
    return or_else(nothing, evidence_of_backward, kept, gradients, operation, edge, scale)


def origin_of(
    backward: Backward,
    suspect: Suspect,
    leaves: Sequence[BadLeaf],
    seen: BackwardEvidence | None,
    factor: float = 1.0,
) -> Origin:
    """Describe for the user where a bad gradient began.

    Args:
        backward: the backward of the graph.
        suspect: one of :func:`~fxguard.verdict.backward.suspects_in`.
        leaves: leaves with bad gradients.
        seen: of :func:`seen_of`.
        factor: of :func:`~fxguard.verdict.loss_scale.factor_to_blame`.
    """
    operation, edge = suspect.operation, suspect.edge
    spread = _spread(leaves)
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
    if seen is None:
        return origin
    cause = or_else("unknown", cause_of_backward, seen)
    fixes = _fixes(backward, seen.made_by or operation, cause, seen)
    if factor > 1:
        is_scale = backward.scale is None
        cause = "loss scale" if is_scale else cause
        fixes = (fix_of_factor(seen, factor, is_scale=is_scale), *(() if is_scale else fixes))
    return replace(
        with_counts(origin, seen.detail),
        cause=cause,
        cause_in_words=or_else("", _words, cause, seen),
        operands=or_else("", _operands, backward, seen, edge.label),
        dtype=seen.gradient.dtype,
        limit=LIMITS.get(seen.gradient.dtype),
        needed=seen.gradient.needed if suspect.severity is Severity.INF else None,
        fixes=fixes,
    )


def _spread(leaves: Sequence[BadLeaf]) -> tuple[str, ...]:
    """``the gradients of a.weight``, and the next names."""
    names = [leaf.name.removeprefix("weight ") for leaf in leaves[:MOST_NAMES]]
    gradients = "the gradient" if len(leaves) == 1 else "the gradients"
    return (f"{gradients} of {names[0]}", *names[1:])


def _words(cause: str, seen: BackwardEvidence) -> str:
    """The cause as it is printed: that of an operation inside, or of the forward."""
    if seen.gradient.degeneracy and cause in ("singular gradient", "rounding"):
        what = degeneracy_in_words(seen.gradient)
        return what if cause == "singular gradient" else f"{what}, after rounding"
    if seen.of_exponent and cause == "domain" and seen.forward is None:
        return "the exponent's gradient needs the log of a negative number"
    if seen.forward is not None and seen.inside is None and cause == "singular gradient":
        what = words_for(cause_of(seen.forward), seen.forward)
        return f"{what} in the forward: its result is masked, its gradient is not" if what else ""
    if is_of_small_operand(cause, seen):
        return "its operand is so small that the derivative overflows"
    return words_for(cause, seen.forward if seen.inside is None else seen.inside.evidence)


def _operands(backward: Backward, seen: BackwardEvidence, label: str) -> str:
    """The numbers at the bad element: those of the forward if something was already bad there."""
    if seen.inside is not None:
        source = seen.inside.source
        line = "" if source is None else f" ({source.place}: {source.code})"
        return f"{operands_text(seen.inside.evidence)} in its own backward{line}"
    if seen.made_by is None or seen.forward is None:
        return gradient_text(seen.gradient, seen.came_in, label)
    frame = backward.frame_of(seen.made_by)
    where = "" if frame.source is None else f" ({frame.source.place})"
    problem = "NaN" if math.isnan(seen.forward.number) else f"{seen.forward.number:g}"
    return f"it read {problem} that {frame.kind}{where} made: {operands_text(seen.forward)}"


def _fixes(
    backward: Backward, operation: BackwardOf, cause: str, seen: BackwardEvidence
) -> tuple[Fix, ...]:
    nothing: tuple[Fix, ...] = ()
    if seen.inside is not None:
        evidence = seen.inside.evidence
        around = Surroundings.of_nothing(evidence.kind, evidence.dtype)
        return or_else(nothing, fixes_for, cause, evidence, around)
    known = backward.step_of(operation)
    if known is None or not known[1].outputs:
        return ()
    index, step = known
    blame = Blame(step.outputs[0], index, Severity.NAN)
    around = Surroundings(backward.plan.steps, backward.plan.values, blame)
    is_zero = seen.forward is not None and cause_of(seen.forward) == "zero divisor"
    if cause == "singular gradient" and is_zero and plain(step.kind) in ("div", "reciprocal"):
        cause = cause if is_chosen_after(Case(cause, seen.forward, around)) else "zero divisor"
    if is_of_small_operand(cause, seen):
        cause = "underflow"
    return or_else(nothing, fixes_for, cause, seen.forward or seen.gradient, around)


def _of_sum(backward: Backward, suspect: Suspect, spread: tuple[str, ...], count: int) -> Origin:
    """The origin for finite gradients without a finite sum."""
    makers = (o for o in backward.gradients.operations if suspect.summed in o.made)
    maker = next(makers, None)
    number = backward.kept.batch_number
    frame = Frame("", "sum of gradients", True, (), batch_number=number, phase="backward")
    what = "an input of the graph"
    if maker is not None:
        frame = backward.frame_of(maker)
        what = f"the result of {frame.title.removesuffix(' (backward)')}"
    assert suspect.summed is not None
    if name := backward.gradients.weights.get(suspect.summed):
        what = f"weight {name}"
    return Origin(
        frame=frame,
        problem=suspect.severity.problem,
        what=GRADIENT_OF + what,
        row="grad of output",
        cause="overflow",
        operands="finite gradients come from several operations, and their sum is not finite",
        spread=spread,
        spread_count=count,
    )


def origin_of_function(function: KeptFunction, leaves: Sequence[BadLeaf]) -> Origin | None:
    """The origin for a bad gradient from an autograd function outside every graph, else None.

    Args:
        function: the function, with the gradients of this backward.
        leaves: leaves with bad gradients.
    """
    incoming, handed_back = function.rows()
    bad = next((row for row in handed_back if row.is_bad), None)
    if bad is None or bad.abs_max is None or any(row.is_bad for row in incoming):
        return None
    kind = function.kind.__name__
    frame = Frame(
        "",
        kind,
        True,
        (*incoming, *handed_back),
        function.source,
        batch_number=function.batch_number,
        phase="backward",
    )
    return Origin(
        frame,
        Severity.of(bad.abs_max).problem,
        kind,
        bad.label,
        spread=_spread(leaves),
        spread_count=len(leaves),
    )


def origin_of_leaves(
    leaves: Sequence[BadLeaf], came_in: tuple[int, Severity] | None, batch_number: int
) -> Origin:
    """The same if no operation can be blamed.

    Args:
        leaves: leaves with bad gradients.
        came_in: the output of the model whose incoming gradient was bad, and how bad; None if none.
        batch_number: number of the batch.
    """
    if came_in is not None:
        position, severity = came_in
        what, label = "what the model returned", f"output[{position}]"
        kind, phase = "loss", "loss"
    else:
        severity, more = leaves[0].severity, len(leaves) - 1
        what = leaves[0].name + (f" and of {more} more" if more else "")
        label, kind, phase = leaves[0].name, "gradient", "backward"
    number = math.nan if severity is Severity.NAN else math.inf
    row = Row(GRADIENT + label, abs_min=number, abs_max=number)
    frame = Frame("", kind, True, (row,), batch_number=batch_number, phase=phase)
    return Origin(frame, severity.problem, GRADIENT_OF + what, row.label)
