"""Describes for the user where a bad gradient began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxguard.advice.beginnings import ASKS_BACK, LOOKS
from fxguard.advice.case import Case
from fxguard.advice.causes import cause_of
from fxguard.advice.fixes import MOST_FIXES, fixes_for
from fxguard.advice.given import fixes_of_given
from fxguard.advice.iterated import fix_of_turns
from fxguard.advice.operands import gradient_text, operands_text
from fxguard.advice.sigmoids import fix_of_sigmoid
from fxguard.advice.signs import is_chosen_after
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.words import degeneracy_in_words, words_for
from fxguard.batch.dataflow import joined
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_function import KeptFunction
from fxguard.findings import GRADIENT_OF, Climb, Fix, Origin
from fxguard.forgiving import or_else
from fxguard.formats import LIMITS
from fxguard.graph.poles import plain
from fxguard.plan.blame import Blame
from fxguard.records import BACKWARD, GRADIENT, Frame, Role, Row, Severity, Source
from fxguard.rerun.backward_evidence import BackwardEvidence, evidence_of_backward
from fxguard.rerun.backward_flow import SUM, BackwardFlow
from fxguard.rerun.bad_forward import HiddenAfter
from fxguard.rerun.edges import BackwardOf
from fxguard.source.held_tensors import UNNAMED
from fxguard.source.lines import source_of_trace
from fxguard.source.named import gradient_in
from fxguard.verdict.backward import (
    cause_of_backward,
    is_of_infinite_factor,
    is_of_small_operand,
)
from fxguard.verdict.explain import Beyond, climb_to, with_counts
from fxguard.verdict.hidden_numbers import MASKS, fix_of_hidden, hidden_of
from fxguard.verdict.loss_scale import fix_of_factor
from fxguard.verdict.origins import Verdict
from fxguard.verdict.outlying import fix_of_outlier

__all__ = [
    "BadLeaf",
    "Description",
    "name_of_leaf",
    "origin_at",
    "origin_of_function",
    "origin_of_leaves",
    "seen_of",
]

MOST_NAMES = 3  # of leaves
REPAIRS_MORE = "reads it, too"  # in a fix that helps another operation as well

# The operands of an origin whose numbers are not those of the model's backward.
DRAWN_ANEW = "no cause: in a second run the backward of {} has other random numbers"


@dataclass(frozen=True, slots=True)
class BadLeaf:
    """A weight or an input whose gradient was bad."""

    name: str  # "weight fc.weight", "x"
    severity: Severity


def name_of_leaf(run: GraphRun, position: int, held_as: str = "") -> str:
    """The name of an input of a graph: ``weight fc.weight``, ``x``.

    Args:
        run: a run of the graph.
        position: position among its inputs.
        held_as: the name of the model, if names of weights begin with it.
    """
    value = next(value for value in run.plan.values if value.argument == position)
    if value.role is not Role.WEIGHT:
        return value.name
    return f"weight {joined(held_as, run.running_name(value.name))}"


def seen_of(
    backward: BackwardFlow, blame: Blame, scale: float | None = None
) -> BackwardEvidence | None:
    """A closer look at where a bad gradient began; None if that is impossible.

    Args:
        backward: the backward of the graph.
        blame: one of :func:`~fxguard.verdict.backward.origins_of`.
        scale: the known loss scale, which that run has divided out; None if unknown.
    """
    found = backward.edge_of(blame)
    if found is None:
        return None
    nothing: BackwardEvidence | None = None
    kept, gradients = backward.kept, backward.gradients
    if gradients.drawn_anew(found[0]):
        return None
    return or_else(nothing, evidence_of_backward, kept, gradients, *found, scale or 1.0)


class Description:
    """Describes the origins in one graph for users.

    Args:
        backward: the backward of the graph.
        verdict: of :func:`~fxguard.verdict.backward.origins_of`.
        leaves: leaves with bad gradients, in whatever graph.
        scale: the known loss scale, which that run has divided out; None if unknown.
        beyond: finds what came in among the gradients of later graphs.
    """

    def __init__(
        self,
        backward: BackwardFlow,
        verdict: Verdict,
        leaves: Sequence[BadLeaf],
        scale: float | None,
        beyond: Beyond,
    ) -> None:
        self.backward = backward
        self.flow = backward.flow
        self.verdict = verdict
        self.leaves = leaves
        self.scale = scale
        self.beyond = beyond

    def origin(self, blame: Blame, seen: BackwardEvidence | None, factor: float) -> Origin:
        """Describe for the user where a bad gradient began.

        Args:
            blame: one of the origins that a step made.
            seen: of :func:`seen_of`.
            factor: of :func:`~fxguard.verdict.loss_scale.factor_to_blame`.
        """
        assert blame.step is not None
        nothing_hidden: HiddenAfter | None = None
        no_fix: Fix | None = None
        reached = self.reached(blame)
        found = self.backward.edge_of(blame)
        if found is None:
            return self._of_sum(blame, blame.step, reached)
        operation, edge = found
        origin = Origin(
            frame=self.backward.frame_of(blame.step),
            problem=blame.severity.problem,
            what=operation.call.kind,
            row=GRADIENT + edge.label,
            climb=self.climb(blame),
            spread=_spread(reached),
            spread_count=len(reached),
        )
        if seen is None:
            drawn = self.backward.gradients.drawn_anew(operation)
            return replace(origin, operands=DRAWN_ANEW.format(drawn)) if drawn else origin
        origin = replace(
            with_counts(origin, seen.detail),
            operands=or_else("", _operands, self.backward, seen, edge.label),
            dtype=seen.gradient.dtype,
            limit=LIMITS.get(seen.gradient.dtype),
        )
        if any(map(self.backward.severity, self.flow.steps[blame.step].inputs)):
            read = "; the gradient that came in was bad: an ignored operation made it"
            return replace(origin, operands=origin.operands + read)
        cause = or_else("unknown", cause_of_backward, seen)
        fixes = _fixes(self.backward, seen.made_by or operation, cause, seen)
        hidden = or_else(nothing_hidden, hidden_of, self.backward, operation, seen)
        words = or_else("", _words, cause, seen)
        if hidden is not None and cause != "masked row":
            is_by_mask = plain(hidden.hides_call.kind).rstrip("_") in MASKS
            is_recursion = plain(seen.gradient.kind) == "logaddexp"  # over what is not reached
            of_hidden = None if is_recursion else or_else(no_fix, fix_of_hidden, hidden)
            fixes = _with_hidden(fixes, of_hidden, is_by_mask=is_by_mask)
            words = words or f"{hidden.bad.text} in the forward, hidden only after it"
        if factor > 1:
            is_scale = self.scale is None
            cause = "loss scale" if is_scale else cause
            fixes = (fix_of_factor(seen, factor, is_scale=is_scale), *(() if is_scale else fixes))
        return replace(
            origin,
            cause=cause,
            cause_in_words=words,
            needed=seen.gradient.needed if blame.severity is Severity.INF else None,
            fixes=fixes,
        )

    def climb(self, blame: Blame) -> tuple[Climb, ...]:
        """The backward of operations that contributed most to a magnitude that overflowed."""
        if blame.severity is not Severity.INF:
            return ()
        found = climb_to(self.flow, blame, self.beyond)
        return tuple(replace(each, title=each.title + BACKWARD) for each in found)

    def reached(self, blame: Blame) -> list[BadLeaf]:
        """The leaves that an origin gave a bad gradient, as far as is known.

        A bad gradient that goes on to an earlier graph may have reached any leaf there.
        """
        run, sources = self.backward.kept.event, self.verdict.sources
        here = {
            name_of_leaf(run, position, run.held_as): any(
                source.step == blame.step for source in sources[value]
            )
            for position, value in self.backward.arguments.items()
            if value in sources
        }
        names = {leaf.name for leaf in self.leaves}
        goes_on = any(is_bad for name, is_bad in here.items() if name not in names)
        return [leaf for leaf in self.leaves if here.get(leaf.name, goes_on)]

    def _of_sum(self, blame: Blame, step: int, reached: Sequence[BadLeaf]) -> Origin:
        """The origin for a bad gradient that no operation returned."""
        steps, value = self.flow.steps, self.flow.values[blame.value]
        reader = next((i for i, each in enumerate(steps) if blame.value in each.inputs), None)
        number = self.flow.batch_number
        frame = Frame("", SUM, True, (), batch_number=number, phase="backward")
        what = "an input of the graph"
        if reader is not None:
            frame = self.backward.frame_of(reader)
            what = f"the result of {frame.title.removesuffix(BACKWARD)}"
        elif value.name:
            what = f"weight {joined(self.backward.kept.event.held_as, value.name)}"
        cause, operands = "unknown", "no operation that was looked at returned it"
        if steps[step].inputs:
            cause = "overflow"
            operands = "finite gradients come from several operations, and their sum is not finite"
        return Origin(
            frame=frame,
            problem=blame.severity.problem,
            what=GRADIENT_OF + what,
            row="grad of output",
            cause=cause,
            operands=operands,
            spread=_spread(reached),
            spread_count=len(reached),
        )


def _spread(leaves: Sequence[BadLeaf]) -> tuple[str, ...]:
    """``the gradients of a.weight``, and the next names."""
    if not leaves:
        return ()
    named = (leaf.name.removeprefix("weight ") for leaf in leaves[:MOST_NAMES])
    names = ["a tensor of the script" if name == UNNAMED else name for name in named]
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
        hidden = "what follows hides the result, but not its gradient"
        return f"{what} in the forward: {hidden}" if what else ""
    if cause == "domain" and seen.inside is None and is_of_infinite_factor(seen):
        return "0 * inf"
    if is_of_small_operand(cause, seen):
        return "its operand is so small that the derivative overflows"
    return words_for(cause, seen.forward if seen.inside is None else seen.inside.evidence)


def _operands(backward: BackwardFlow, seen: BackwardEvidence, label: str) -> str:
    """The numbers at the bad element: those of the forward if something was already bad there."""
    if seen.inside is not None:
        source = seen.inside.source
        line = "" if source is None else f" ({source.place}: {source.code})"
        return f"{operands_text(seen.inside.evidence)} in its own backward{line}"
    if seen.made_by is None or seen.forward is None:
        return gradient_text(seen.gradient, seen.came_in, label)
    source = source_of_trace(seen.made_by.node.meta.get("stack_trace"))
    where = "" if source is None else f" ({source.place})"
    problem = "NaN" if math.isnan(seen.forward.number) else f"{seen.forward.number:g}"
    made = f"{seen.made_by.call.kind}{where} made: {operands_text(seen.forward)}"
    return f"it read {problem} that {made}"


def _fixes(
    backward: BackwardFlow, operation: BackwardOf, cause: str, seen: BackwardEvidence
) -> tuple[Fix, ...]:
    nothing: tuple[Fix, ...] = ()
    if seen.inside is not None:
        evidence = seen.inside.evidence
        around = Surroundings.of_nothing(evidence.kind, evidence.dtype, seen.inside.source)
        fixes = or_else(nothing, fixes_for, cause, evidence, around)
        if cause != "overflow":
            return fixes
        source, none = seen.inside.source, None
        first = or_else(none, fix_of_sigmoid, source) or fix_of_turns(source)
        return fixes if first is None else (first, *fixes)[:MOST_FIXES]
    known = backward.planned(operation)
    if known is None or not known[1].outputs:
        return ()
    index, step = known
    blame = Blame(step.outputs[0], index, Severity.NAN)
    around = Surroundings(*backward.kept.event.running_plan(), blame)
    is_zero = seen.forward is not None and cause_of(seen.forward) == "zero divisor"
    if cause == "singular gradient" and is_zero and plain(step.kind) in ("div", "reciprocal"):
        cause = cause if is_chosen_after(Case(cause, seen.forward, around)) else "zero divisor"
    if is_of_small_operand(cause, seen):
        cause = "underflow"
    fixes = or_else(nothing, fixes_for, cause, seen.forward or seen.gradient, around)
    sample = (seen.forward or seen.gradient).index[:1]
    if cause != "overflow" or not sample or not (fixes and fixes[0].text.startswith(ASKS_BACK)):
        return fixes
    tensor_of = backward.kept.argument
    given = (
        around.steps,
        around.values,
        step.inputs,
        sample[0],
        tensor_of,
        lambda value: around.values[value].name,
    )
    return (*or_else(nothing, fix_of_outlier, *given), *fixes)[:MOST_FIXES]


def _with_hidden(
    fixes: tuple[Fix, ...], of_hidden: Fix | None, *, is_by_mask: bool
) -> tuple[Fix, ...]:
    """What to do about what is hidden too late comes first, but for what repairs more.

    What an index hides may have been read elsewhere.
    """
    if of_hidden is None or any(each.kind == "exact" for each in fixes):
        return fixes
    first = fixes[0].text if fixes else ""
    is_sure = not is_by_mask and not first.startswith(LOOKS)
    kept = 1 if fixes and (REPAIRS_MORE in first or is_sure) else 0
    return (*fixes[:kept], of_hidden, *fixes[kept:])[:MOST_FIXES]


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


def origin_at(origin: Origin, set_at: Source) -> Origin:
    """The same where a line of the script gave the leaves their gradients."""
    read = set_at.code.partition("=")[2].strip()
    gradient, is_nan = gradient_in(read), origin.problem == "NaN"
    fixes = fixes_of_given(
        Role.INPUT,
        "its gradient",
        gradient=gradient,
        is_inf=bool(gradient) or not is_nan,
        has_nan=is_nan,
    )
    told = f"it was set at {set_at}"
    return replace(origin, frame=replace(origin.frame, source=set_at), operands=told, fixes=fixes)
