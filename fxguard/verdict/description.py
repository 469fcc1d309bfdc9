"""Describes the origins of a judgment for users: what it is, what led to it, what to do."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.advice.beginnings import ASKS_BACK, BOUND, GREW, IN_LOGS, REJECT
from fxguard.advice.case import Case
from fxguard.advice.causes import needed_by
from fxguard.advice.fixes import MOST_FIXES, fixes_for
from fxguard.advice.given import fixes_of_entry, fixes_of_given
from fxguard.advice.operands import DIMS_OF_HEADS, operands_text
from fxguard.advice.positive import made_at
from fxguard.advice.reduced_rows import words_of_rows
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.words import words_for
from fxguard.advice.written_operands import titled
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.frames import FrameView
from fxguard.batch.step import Step
from fxguard.findings import Fix, Origin
from fxguard.forgiving import or_else
from fxguard.formats import HALVES, LIMITS
from fxguard.graph.heads import is_of_heads
from fxguard.graph.mask_makers import masks_behind
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.measure.columns import Columns, large_columns
from fxguard.measure.details import Detail, are_logs_of_counts
from fxguard.passes.unmark import without_marks
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step as PlannedStep
from fxguard.records import Range, Role, Row, Severity, Source
from fxguard.rerun.hiding_masks import hidden_by
from fxguard.source.assigned import assignments_of, converted_by, in_words
from fxguard.source.call_site import variable_given
from fxguard.source.lines import source_at, source_of_caller
from fxguard.source.named import gradient_in, operand_texts
from fxguard.source.numpy_warnings import WARNED
from fxguard.source.suspects import Bad, Suspected, suspects_in
from fxguard.source.written import operand_in
from fxguard.verdict.computed_of import computed_of
from fxguard.verdict.explain import Spread, climb_to, growth_of, with_counts
from fxguard.verdict.grown import (
    fixes_of_factors,
    fixes_of_growth,
    fixes_of_updates,
)
from fxguard.verdict.grown_in_turns import fixes_of_turns
from fxguard.verdict.hidden_rows import masks_of_graph, masks_of_text
from fxguard.verdict.judge import Judgment
from fxguard.verdict.loops import turn_in_loop, turn_of
from fxguard.verdict.outlying import fix_of_outlier
from fxguard.verdict.returned import returned_by
from fxguard.verdict.second_opinion import FAILURES, SecondOpinion
from fxguard.verdict.trials import tried, with_tried

__all__ = ["Description", "position_of"]

NO_CAUSE = "no cause: "  # prefix of the operands of an origin
NO_ELEMENTS = "no elements: "  # the same where magnitudes tell the cause
BOUNDS = ("bound the argument", "choose the divisor")  # how advice begins that keeps 0 away
# These write an average into a buffer, or begin to.
AVERAGES = frozenset(["add_", "copy_", "iadd", "isub", "lerp_", "mul_", "sub_"])
_NOTHING = PlannedStep("", "", (), ())


class Description:
    """Describes the origins of a judgment for users."""

    def __init__(self, judgment: Judgment, opinion: SecondOpinion, view: FrameView) -> None:
        self.judgment = judgment
        self.opinion = opinion
        self.flow = judgment.flow
        self.step = Step(judgment.batch, judgment.flow)
        self.view = view
        self.spread = Spread(judgment.flow, judgment.verdict)
        origins = (blame for blame in judgment.verdict.origins if blame.step is not None)
        self.first = next(origins, None)  # the operation for which a fix is to be tried

    def origin(self, blame: Blame) -> Origin:
        """Name a blamed value."""
        if blame.step is not None:
            what = self.flow.steps[blame.step].kind
        else:
            what = self.judgment.name_of(blame.value)
        position = self.position(blame)
        index = sum(shown < position for shown in self.view.shown(self.flow))
        frame = self.view.render(self.flow, position, index)
        label = next((row.label for row in frame.rows if row.is_bad), "output")
        for row in self.flow.frames[position].rows:
            if row.value == blame.value:
                label = row.label
        return Origin(frame, blame.severity.problem, what, label)

    def noted(self, blame: Blame) -> Origin:
        """An origin whose bad values reach no output as such."""
        opinion = self.opinion.absorbed[blame]
        cause, evidence = self.opinion.cause(blame), self.opinion.evidence(blame)
        return replace(
            self.origin(blame),
            cause=cause,
            cause_in_words=or_else("", self.words, blame, cause),
            not_judged=opinion.not_judged,
            harm=self.part_in_harm(blame, cause),
            first_bad=None if evidence is None else evidence.number,
        )

    def part_in_harm(self, blame: Blame, cause: str) -> str:
        """What was computed of an infinity that float64 has too; a second run tells of others."""
        if cause in FAILURES:
            return ""
        return computed_of(self.flow, blame.value, self.judgment.verdict.origins)

    def explained(self, blame: Blame) -> Origin:
        """An origin with the details of its tensor, what led to it and its consequences."""
        flow, verdict = self.flow, self.judgment.verdict
        dtype, is_inf = flow.values[blame.value].dtype, blame.severity is Severity.INF
        titles, count, returned = self.spread.of(blame)
        evidence, judged = self.opinion.evidence(blame), self.opinion.absorbed.get(blame)
        cause = self.opinion.cause(blame)
        origin = replace(
            self.origin(blame),
            dtype=dtype,
            limit=LIMITS.get(dtype),
            follows=verdict.sources.get(blame.value, (blame,)) != (blame,),
            autocast=self.autocast(blame),
            climb=climb_to(flow, blame, self.step.before) if is_inf else (),
            spread=titles,
            spread_count=count,
            reached_output=returned,
            returned_by=returned_by(self.judgment.batch, flow, self.view.model) if returned else "",
            turn=turn_of(flow, blame) if self.judgment.batch.holds_all else "",
            cause=cause,
            cause_in_words=or_else("", self.words, blame, cause),
            comes_from=or_else("", self.comes_from, blame),
            operands=self.operands(blame),
            first_bad=or_else(None, self.pole, blame) if evidence is None else None,
            needed=needed_by(evidence) if evidence is not None and is_inf else None,
            fixes=self.fixes(blame),
            harm="" if judged is None else judged.harm,
        )
        # The cause is not in an origin that only followed, so that is not worth a second run.
        detail = None if origin.follows else self.judgment.detail(blame)
        if detail is None:
            return origin
        fixes = origin.fixes
        if blame.step is None:
            fixes = self.fixes_of_given(blame, detail, origin)
        elif cause == "data":
            fixes = fixes_of_entry(detail.nan_count > 0, self.suspects(blame, detail))
        turn = turn_in_loop(detail) or origin.turn
        return replace(with_counts(origin, detail), fixes=fixes, turn=turn)

    def words(self, blame: Blame, name: str) -> str:
        """The cause with this name as it is printed."""
        if blame.step is None:
            return ""
        case = Case(name, self.opinion.deduced(blame), self.around(blame))
        return words_for(
            name,
            case.evidence,
            of_mask=case.reads_mask() and not words_of_rows(case),
            lost_eps=case.lost_number(),
        )

    def pole(self, blame: Blame) -> float | None:
        """``-inf`` of a logarithm of 0, which magnitudes alone tell; None of other numbers."""
        found = self.opinion.deduced(blame)
        return -math.inf if found is not None and found.number == -math.inf else None

    def comes_from(self, blame: Blame) -> str:
        """Where the operand, or a value that was given, got its value in the script."""
        if blame.step is not None:
            case = Case("", None, self.around(blame))
            is_masked = self.opinion.cause(blame) == "masked row"
            masks = or_else("", self.masks, blame, case) if is_masked else ""
            return "; ".join(filter(None, (case.comes_from, masks)))
        found = self.assigned(blame)
        if not found:
            return ""
        is_argument = self.judgment.name_of(blame.value).startswith("argument ")
        told = in_words(found)
        if is_argument:
            told = f"it is made from {told.replace(' comes', ', which comes', 1)}"
        return told

    def masks(self, blame: Blame, case: Case) -> str:
        """Where the masks of a row were made that hide all of it."""
        found = self.node_of(blame)
        if found is None:
            shown = [case.around.step.source, *(source for _, source in case.assignments)]
            return masks_of_text([source for source in shown if source is not None])
        forward = None if self.view.model is None else type(self.view.model).forward
        masks, evidence = masks_behind(*found), self.opinion.evidence(blame)
        run = self.judgment.batch.run_of(self.flow.keys[blame.value])
        by = None
        if masks and evidence is not None and run is not None:
            by = or_else(None, hidden_by, run, found[0], masks, evidence.index)
        return masks_of_graph(masks, by, forward)

    def is_of_heads(self, blame: Blame) -> bool:
        """Whether dimension 1 of the bad tensor are the heads of an attention."""
        found = self.node_of(blame)
        return found is not None and is_of_heads(*found)

    def node_of(self, blame: Blame) -> tuple[Node, GraphModule] | None:
        """The node of an operation to blame, and its graph; None in a body, and between graphs."""
        key = self.flow.keys[blame.value]
        run = None if key.is_between_graphs else self.judgment.batch.run_of(key)
        step = None if blame.step is None else self.flow.steps[blame.step]
        if run is None or step is None or step.inside or not step.node:
            return None
        module = without_marks(run.graph_module)
        node = next((each for each in module.graph.nodes if each.name == step.node), None)
        return None if node is None else (node, module)

    def assigned(self, blame: Blame) -> list[tuple[str, Source]]:
        """The variable that an operation was given as an input, and its assignments.

        See :func:`~fxguard.source.assigned.assignments_of`.
        """
        if blame.step is not None:
            return Case("", None, self.around(blame)).assignments
        source = self.origin(blame).frame.source
        name = self.judgment.name_of(blame.value).removeprefix("input ").strip("`")
        if name.startswith("argument ") and self.view.model is not None:
            source = source_of_caller()  # the model has not returned to it yet
            forward = type(self.view.model).forward
            name = "" if source is None else variable_given(name, forward, source)
        elif source is not None and name.startswith("input[0] of "):
            name = converted_by(source.code, name.rpartition(" ")[2])
        return [] if source is None or not name.isidentifier() else assignments_of(name, source)

    def suspects(self, blame: Blame, detail: Detail) -> Suspected | None:
        """What may have made an input that nobody saw being made."""
        has_nan, has_plus = detail.nan_count > 0, detail.posinf_count > 0
        is_log = detail.neginf_count > 0 and not (has_nan or has_plus)
        tensor = self.judgment.batch.tensor_of(self.flow.keys[blame.value]) if is_log else None
        counts = tensor is not None and or_else(False, are_logs_of_counts, tensor)
        has_minus, is_all = detail.neginf_count > 0, detail.bad_count == detail.numel
        bad = Bad(has_nan, has_plus, has_minus, detail.numel, counts, is_all)
        nowhere: list[tuple[str, Source]] = []
        assigned = or_else(nowhere, self.assigned, blame)
        nothing: Suspected | None = None
        made = assigned[-1][1] if assigned else None
        suspected = nothing if made is None else or_else(nothing, suspects_in, made, bad)
        warned = WARNED.suspected(bad)
        if warned is not None:
            text = "" if suspected is None else suspected.text
            if suspected is None or any(source.place in text for source in warned[1]):
                return warned[0]
        if made is None or suspected is None or not suspected.line:
            return suspected
        return replace(suspected, at=source_at((made.file, suspected.line)))

    def around(self, blame: Blame) -> Surroundings:
        """The graph around an operation to blame."""
        intended = self.judgment.verdict.intended
        features = self.judgment.features
        steps, values = self.flow.steps, self.flow.values
        return Surroundings(
            steps, values, blame, intended, features, self.made_before, self.range_of
        )

    def range_of(self, value: int) -> Range | None:
        """The range of a value; None where it was not measured."""
        found = self.flow.ranges[value]
        return found if isinstance(found, Range) else None

    def made_before(self, value: int) -> PlannedStep | None:
        """The operation that made a value in an earlier batch of this step, such as a model's."""
        place = self.step.before(self.flow, value)
        if place is None or not place[0].steps:
            return None
        flow, value = place
        return made_at(Surroundings(flow.steps, flow.values, Blame(value, 0, Severity.NAN)), value)

    def operands(self, blame: Blame) -> str:
        """The numbers at the first bad element, or why nobody has looked at them."""
        evidence = self.opinion.evidence(blame)
        if evidence is not None:
            of_heads = evidence.dims == DIMS_OF_HEADS and or_else(False, self.is_of_heads, blame)
            of_state = or_else("", self.of_state, blame)
            told = functools.partial(operands_text, of_heads=of_heads, of_state=of_state)
            return or_else("", told, evidence)
        reason = self.opinion.no_cause(blame)
        is_known = self.opinion.deduced(blame) is not None  # by magnitudes alone
        return (NO_ELEMENTS if is_known else NO_CAUSE) + reason if reason else ""

    def of_state(self, blame: Blame) -> str:
        """``from float32 buffers on``, if an origin is of what earlier batches have left there."""
        flow, left = self.flow, self.judgment.left_before
        makers = {value: step for step in flow.steps for value in step.outputs}
        todo, seen = [blame.value], {blame.value}
        while todo:
            value = todo.pop()
            dtype, role = flow.values[value].dtype, flow.values[value].role
            if value in left and role is Role.BUFFER and dtype in (*HALVES, "float32"):
                return f"from {dtype} buffers on"
            step = makers.get(value)
            todo += [] if step is None else [each for each in step.inputs if each not in seen]
            seen.update(todo)
        return ""

    def fixes_of_given(self, blame: Blame, detail: Detail, origin: Origin) -> tuple[Fix, ...]:
        """What to do about a value with these details that was already bad."""
        source = origin.frame.source
        readers = (step for step in self.flow.steps if blame.value in step.inputs)
        are_tensors = len(next(readers, _NOTHING).inputs) == 2
        is_known = source is not None and are_tensors
        written = operand_in(source.code, origin.what) if source and is_known else ""
        return fixes_of_given(
            self.flow.values[blame.value].role,
            self.judgment.name_of(blame.value),
            # In the first batch it has not been updated.
            is_all_bad=detail.bad_count == detail.numel and self.judgment.batch.number > 0,
            is_log=detail.bad_count == detail.neginf_count,
            is_inf=detail.nan_count == 0,
            has_nan=detail.nan_count > 0,
            largest=detail.largest_finite or 0.0,
            written=written,
            suspects=self.suspects(blame, detail),
            gradient=self._gradient_of(blame, source),
            averaged=self._averaged(blame, detail),
        )

    def _averaged(self, blame: Blame, detail: Detail) -> str:
        """The operation that writes a buffer which began at inf, ``add (q.py:32)``; "" if none."""
        began = detail.numel in (detail.posinf_count, detail.neginf_count)
        if not began or self.flow.values[blame.value].role is not Role.BUFFER:
            return ""
        read_by = [step for step in self.flow.steps if step.inputs[:1] == (blame.value,)]
        step = next((each for each in read_by if each.kind in AVERAGES), None)
        return "" if step is None else titled(step)

    def _gradient_of(self, blame: Blame, source: Source | None) -> str:
        """The expression that the line has for a value, if that is the gradient of a weight."""
        gradient = "" if source is None else gradient_in(source.code)
        names = [plain(step.kind) for step in self.flow.steps if blame.value in step.inputs]
        if source is None or not gradient or not names:
            return ""
        return gradient if gradient in operand_texts(source.code, names[0]) else ""

    def fixes(self, blame: Blame) -> tuple[Fix, ...]:
        """What to do about an origin."""
        if blame.step is None:
            value = self.flow.values[blame.value]
            return fixes_of_given(value.role, self.judgment.name_of(blame.value))
        around = self.around(blame)
        cause = self.opinion.cause(blame)
        nothing: tuple[Fix, ...] = ()
        fixes = or_else(nothing, fixes_for, cause, self.opinion.deduced(blame), around)
        if fixes and fixes[0].text.startswith(GREW):
            grown = growth_of(self.flow, blame, self.step.before)
            told = Fix("advice", f"look at {grown}: scale the inputs, or bound its argument")
            fixes = (told, *fixes[1:]) if grown else fixes
        if cause == "overflow":
            before = self.step.before
            factors = or_else(nothing, fixes_of_factors, self.flow, blame, before, around)
            fixes = (*factors, *fixes)[:MOST_FIXES]
            if factors and self.flow.values[blame.value].dtype not in HALVES:
                return fixes
        if cause == "overflow" and self.flow.values[blame.value].dtype not in HALVES:
            given = self.flow, blame, self.step.before
            updates = or_else(nothing, fixes_of_updates, *given)
            updates = updates or or_else(nothing, fixes_of_turns, *given)
            if updates and not (fixes and fixes[0].text.startswith(IN_LOGS)):
                first = 1 if fixes and fixes[0].text.startswith(REJECT) else 0
                return (*fixes[:first], *updates, *fixes[first:])[:MOST_FIXES]
        if fixes and fixes[0].text.startswith(ASKS_BACK):
            causes = or_else(
                nothing, fixes_of_growth, self.flow, blame, self.step.before, self.columns
            )
            evidence = self.opinion.evidence(blame)
            if not causes and cause == "overflow" and evidence is not None and evidence.index:
                step, tensor_of = self.flow.steps[blame.step], self.tensor_of
                place = self.flow.steps, self.flow.values, step.inputs, evidence.index[0]
                causes = or_else(nothing, fix_of_outlier, *place, tensor_of, self.judgment.name_of)
            kept = 1 if fixes[0].text.startswith(BOUND) else 0
            fixes = (*fixes[:kept], *causes, *fixes[kept:])[:MOST_FIXES]
        if cause == "zero divisor" and fixes and fixes[0].text.startswith(BOUNDS):
            fixes = (*or_else(nothing, self.of_zero_argument, around), *fixes)[:MOST_FIXES]
        if cause not in FAILURES or self.flow.values[blame.value].dtype not in HALVES:
            return fixes
        if cause == "overflow" and not any(each.kind == "exact" for each in fixes):
            unscaled = or_else(nothing, self.unscaled, blame)
            fixes = (*unscaled, *fixes)[:MOST_FIXES]
        if blame != self.first:
            return fixes
        keys = self.flow.keys
        absorbed = self.judgment.verdict.absorbed
        harmless = [keys[other.value] for other in absorbed if other.step is not None]
        return with_tried(fixes, tried(self.judgment.batch, keys[blame.value], harmless))

    def of_zero_argument(self, around: Surroundings) -> tuple[Fix, ...]:
        """Leave out the call that gave the model an argument of zeros; () if that is no operand."""
        value = around.culprit
        while value is not None and (step := around.maker_of(value)) is not None:
            is_passed = not step.counts or step.kind in MOVES | CASTS | SELECTS
            value = step.inputs[0] if is_passed and len(step.inputs) == 1 else None
        given = None if value is None else self.range_of(value)
        name = "" if value is None else self.judgment.name_of(value)
        found, caller = re.match(r"argument `(\w+)` of ", name), source_of_caller()
        if given is None or given.abs_max != 0 or found is None or caller is None:
            return ()
        text = f"leave out the call at {caller.place}, which gives {found[1]} = 0, if 0 ends a "
        return (Fix("advice", text + "schedule: no step is left to take there"),)

    def unscaled(self, blame: Blame) -> tuple[Fix, ...]:
        """What to do about a layer in half precision that has overflowed of the model's input."""
        evidence, sample = self.opinion.evidence(blame), None
        if evidence is not None and evidence.sample is not None:
            tensors = [x for x in evidence.operands if x.dtype]
            largest = max((abs(end) for x in tensors for end in (x.low, x.high)), default=0.0)
            sample = evidence.sample, largest
        return fixes_of_growth(
            self.flow, blame, self.step.before, self.columns, only_itself=True, of_sample=sample
        )

    def tensor_of(self, value: int) -> Tensor | None:
        """An input of this batch, if it is still there."""
        return self.judgment.batch.tensor_of(self.flow.keys[value])

    def columns(self, flow: DataFlow, value: int) -> Columns | None:
        """The columns of an input of this batch that hold far larger numbers than the others."""
        if flow is not self.flow or flow.values[value].role is not Role.INPUT:
            return None
        table = self.judgment.batch.tensor_of(flow.keys[value])
        return None if table is None else large_columns(table)

    def autocast(self, blame: Blame) -> tuple[Row, ...]:
        """The operands that autocast turned into infinities, as rows of the operation."""
        beyond = self.judgment.beyond_autocast(blame)
        rows = self.flow.frames[self.position(blame)].rows if beyond else ()
        labels = {row.value: row.label for row in reversed(rows)}
        values = {value: self.flow.values[value] for value in beyond}
        return tuple(
            Row(
                labels.get(value, known.name.rpartition(".")[2]),
                abs_max=self.judgment.abs_max(value),
                dtype=known.dtype,
            )
            for value, known in values.items()
        )

    def position(self, blame: Blame) -> int:
        """Index of the frame that shows an origin first."""
        return position_of(self.flow, self.view, blame)


def position_of(flow: DataFlow, view: FrameView, blame: Blame) -> int:
    """Index of the first shown frame that shows an origin."""
    for position, frame in enumerate(flow.frames):
        if not view.shows(frame):
            continue
        if blame.step is not None and frame.step == blame.step:
            return position
        if any(row.value == blame.value for row in frame.rows):
            return position
        # A module's own weights are rows of its frame.
        value = flow.values[blame.value]
        owner = value.name.rpartition(".")[0] if value.role is Role.WEIGHT else None
        if frame.name == owner and not frame.is_op:
            return position
    return len(flow.frames) - 1
