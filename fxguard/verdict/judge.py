"""Judges one batch: the rules of :mod:`~fxguard.verdict.origins` on numbers and tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.forgiving import where_theirs_may_raise
from fxguard.formats import LIMITS, limit_of
from fxguard.graph.tables import ADDITIONS, CASTS, END_OF_MASKS
from fxguard.measure.at_hand import dtype_of, own_arithmetic, range_of
from fxguard.measure.details import Detail, describe
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Range, Role, Severity
from fxguard.rerun.details import detail_of
from fxguard.rerun.turned import turned_infinite
from fxguard.torch_names import is_any_autocast_on
from fxguard.verdict import origins
from fxguard.verdict.bounds import RULES
from fxguard.verdict.explain import beyond
from fxguard.verdict.masks import emptied_rows, features, made_masks, summed_masks
from fxguard.verdict.precedents import Answer, Conditions, Question

__all__ = ["Judgment", "answer"]


class Judgment:
    """The verdict on a batch that is not closed yet.

    Args:
        batch: the batch; its tensors are read where numbers do not suffice.
        flow: the data flow of the batch.
        is_ignored: whether the user ignores an operation.

    Attributes:
        verdict: the verdict.
        answers: answers to questions about tensors that no graph measures.
    """

    def __init__(self, batch: Batch, flow: DataFlow, is_ignored: Callable[[Step], bool]) -> None:
        self.batch = batch
        self.flow = flow
        self.is_ignored = is_ignored
        self.answers: dict[Question, Answer] = {}
        self.turned: dict[int, dict[int, bool]] = {}  # event to values that were examined
        self.details: dict[int, Detail | None] = {}  # of values that a second run has shown
        self.features: set[int] = set()  # inputs that hold -inf, and are no masks
        self.verdict = self.judge()
        if overflowed := self.overflowed():
            self.verdict = self.judge(overflowed)
        if self.verdict.origins:
            self.judge_masks(overflowed)

    def judge_masks(self, overflowed: Collection[int]) -> None:
        """Judge once more with the masks that are known by their use alone."""
        made = made_masks(self.flow, self.verdict, self.detail)
        summed = summed_masks(self.flow, self.verdict, self.detail)
        made |= summed
        found = features(self.flow, self.verdict)
        self.features = {v for v in found if self.flow.keys[v] not in self.batch.masks}
        if made or self.features:
            self.verdict = self.judge(overflowed, made)
        is_returned = bool(summed) and not self.verdict.origins
        emptied = emptied_rows(self.flow, self.verdict, self.detail, returned=is_returned)
        if emptied:
            self.verdict = self.judge(overflowed, made, emptied)
        if not self.verdict.origins:  # a whole row is masked, and its -inf was returned
            self.verdict = self.judge(overflowed)

    def judge(
        self,
        overflowed: Collection[int] = (),
        made: Collection[int] = (),
        emptied: Collection[int] = (),
    ) -> origins.Verdict:
        """Trace bad values back to their origins."""
        found = origins.find_origins(
            self.flow.steps,
            self.flow.values,
            self.severity,
            abs_max=self.abs_max,
            is_mask=self.is_mask,
            finite_part=self.finite_part,
            turned_infinite=self.turned_infinite,
            reached=self.flow.reached,
            written=self.flow.written,
            is_ignored=self.is_ignored,
            overflowed=overflowed,
            made_masks=made,
            emptied=emptied,
        )
        if self.batch.part is None:
            return found
        keys, is_apart = self.flow.keys, self.batch.is_apart
        both = tuple(blame for blame in found.both if not is_apart(keys[blame.value]))
        absorbed = tuple(blame for blame in found.absorbed if blame in both)
        return replace(found, both=both, absorbed=absorbed)

    def range_of(self, value: int) -> Range | None:
        """The range of a value; weights are measured now."""
        number = self.flow.ranges[value]
        if isinstance(number, Range):
            return number
        role = self.flow.values[value].role
        if role.is_standing or role is Role.CONSTANT:
            tensor = self.batch.tensor_of(self.flow.keys[value])
            if tensor is not None:
                self.flow.ranges[value] = number = range_of(tensor)
                question = Question(self.flow.keys[value], "extreme")
                self.answers[question] = _extreme(tensor, number)
        return number if isinstance(number, Range) else None

    def severity(self, value: int) -> Severity:
        """How bad a value is; values without a range count as finite."""
        found = self.range_of(value)
        return Severity.FINITE if found is None else found.severity

    def abs_max(self, value: int) -> float:
        """The largest magnitude of a value; 0 without a range."""
        found = self.range_of(value)
        return 0.0 if found is None else found.abs_max

    def name_of(self, value: int) -> str:
        """The user's name for a value that no operation made."""
        role, name = self.flow.values[value].role, self.flow.values[value].name
        if role is not Role.INPUT:
            return f"{role.value} {name}"
        key = self.flow.keys[value]
        tensor = self.batch.copied.get(key, self.batch.tensor_of(key))
        if tensor is not None and self.batch.call is not None:
            with where_theirs_may_raise():  # any error of a user's container
                if argument := self.batch.call.name_of(tensor):
                    return argument
        if not name.startswith("input["):
            return f"input `{name}`"
        readers = (step for step in self.flow.steps if value in step.inputs)
        reader = next(readers, None)
        if reader is None or not key.is_between_graphs:
            return name
        return f"{name} of {reader.kind}" + (f" in {reader.module}" if reader.module else "")

    def beyond_autocast(self, blame: Blame) -> list[int]:
        """Finite operands of an operation that autocast cast to a dtype that cannot hold them."""
        operands = beyond(self.flow, blame, self.abs_max)
        return operands if operands and self._was_autocast(blame.value) else []

    def _was_autocast(self, value: int) -> bool:
        if self.batch.autocast or is_any_autocast_on():
            return True
        run = self.batch.run_of(self.flow.keys[value])
        if run is None:
            return False
        targets = (getattr(n.target, "__name__", "") for n in run.graph_module.graph.nodes)
        return any("autocast" in name for name in targets)

    def is_mask(self, value: int) -> bool:
        """Whether a tensor that was not made in this batch holds -inf and no +inf.

        Tensors that the model writes hold leftovers of an earlier batch, which are not masks. What
        a model returned to a loss was judged to be infinite on purpose, whatever its sign.
        """
        if self.flow.keys[value] in self.batch.judged_before:
            return True
        if value in self.left_before or value in self.features:
            return False
        question = Question(self.flow.keys[value], "mask")
        self.answers[question] = found = answer(self.batch, question)
        return found is not None

    def finite_part(self, value: int) -> Range:
        """The range of the finite elements of a value; up to inf if not known."""
        found = self.range_of(value)
        if found is None:
            return Range(0.0, math.inf)
        if found.severity and not self.flow.values[value].role.is_given:
            return Range(found.abs_min, math.inf)
        if not found.severity and self.flow.values[value].slot is not None:
            return found
        question = Question(self.flow.keys[value], "mask" if found.severity else "range")
        if question not in self.answers:
            self.answers[question] = answer(self.batch, question)
        known = self.answers[question]
        return known if isinstance(known, Range) else Range(0.0, math.inf)

    def turned_infinite(self, value: int) -> bool | None:
        """Whether an element made from finite ones is infinite; None if unknown."""
        event = self.flow.keys[value].event
        if event not in self.turned:
            self.turned[event] = self._turned_in(event)
        return self.turned[event].get(value)

    def _turned_in(self, event: int) -> dict[int, bool]:
        """The same for all values of one graph run that may be asked about, in one second run."""
        if event == BETWEEN_GRAPHS:
            return {}
        made = (step.outputs[0] for step in self.flow.steps if step.outputs and step.kind in RULES)
        keys = {v: self.flow.keys[v] for v in made if self.severity(v) is Severity.INF}
        wanted = {key.value: value for value, key in keys.items() if key.event == event}
        run = self.batch.run_of(Key(event, 0))
        assert run is not None
        return {wanted[i]: turned for i, turned in turned_infinite(run, wanted).items()}

    @functools.cached_property
    def left_before(self) -> set[int]:
        """Inputs and buffers that hold results of an earlier batch, such as a KV cache."""
        flow = self.flow
        makers = {value: step for step in flow.steps for value in step.outputs}
        written: set[int] = set()
        for index, event in enumerate(self.batch.events):
            for before, now in event.writes(index) if isinstance(event, GraphRun) else ():
                if now is None or not _writes_infinity(makers, flow.place[now]):
                    written.add(flow.place[before])
        # A buffer that several graphs read is a value in each of them.
        names = {flow.values[v].name for v in written if flow.values[v].role is Role.BUFFER}
        return written | {
            index
            for index, value in enumerate(flow.values)
            if value.role is Role.BUFFER and value.name in names
        }

    def conditions(self) -> Conditions | None:
        """The conditions under which another batch with the same pattern of numbers is healthy.

        Returns:
            None if there are none, because elements had to be examined.
        """
        wider = None if self.verdict.bounds is None else self.verdict.bounds.limits()
        if wider is None:
            return None
        answers = {
            question: Range(0.0, math.inf) if isinstance(found, Range) else found
            for question, found in self.answers.items()
        }
        rows: dict[int, list[tuple[int, Range]]] = {}
        for value, within in wider.items():
            key, slot = self.flow.keys[value], self.flow.values[value].slot
            asked = answers.keys() & {Question(key, "mask"), Question(key, "range")}
            answers.update(dict.fromkeys(asked, within))
            if not asked and slot is not None:
                rows.setdefault(key.event, []).append((slot, within))
        limits = {
            event: (
                torch.tensor([slot for slot, _ in found]),
                torch.tensor([[x.abs_min, x.abs_max] for _, x in found], dtype=torch.float64),
            )
            for event, found in rows.items()
        }
        return Conditions(answers, limits)

    def overflowed(self) -> set[int]:
        """Values that look like a mask that became infinite but are not.

        They hold +inf; or a softmax turned them into NaN, and one of their elements is the sum or
        the cast of finite numbers: ``finfo.min + (-20)`` in a fully masked row.
        """
        flow, verdict = self.flow, self.verdict
        blamed = [(flow.steps[x.step], x) for x in verdict.origins if x.step is not None]
        todo = [value for step, _ in blamed for value in step.inputs]
        makers = {value: i for i, step in enumerate(flow.steps) for value in step.outputs}
        is_nan = any(step.kind in END_OF_MASKS and x.severity is Severity.NAN for step, x in blamed)
        overflowed: set[int] = set()
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value in seen or value not in verdict.intended or value not in makers:
                continue
            seen.add(value)
            step = flow.steps[makers[value]]
            todo += step.inputs
            adds = step.kind in ADDITIONS
            if step.infinite_literal or not (adds or step.kind in CASTS):
                continue
            if adds and verdict.intended.isdisjoint(step.inputs):
                detail = self.detail(Blame(value, makers[value], Severity.INF))
                if detail is not None and detail.posinf_count:
                    overflowed.add(value)
            if is_nan and self.turned_infinite(value):
                overflowed.add(value)
        return overflowed

    def detail(self, blame: Blame) -> Detail | None:
        """The details of a blamed tensor, if they can still be seen."""
        key = self.flow.keys[blame.value]
        if blame.step is None:
            tensor = self.batch.tensor_of(key)
            return self.batch.detail_of(key) if tensor is None else describe(tensor)
        run = self.batch.run_of(key)
        if run is None:
            return self.batch.detail_of(key)
        if blame.value not in self.details:
            self.details[blame.value] = detail_of(run, key.value)
        return self.details[blame.value]


def _writes_infinity(makers: Mapping[int, Step], value: int) -> bool:
    """Whether an intended infinity was written into a value, by its last write or earlier."""
    todo = [value]
    while todo:
        step = makers.get(todo.pop())
        if step is not None:
            if step.infinite_literal:
                return True
            todo += step.inputs[:1] if step.counts else step.inputs  # written, or joined
    return False


def answer(batch: Batch, question: Question) -> Answer:
    """Answer a judgment's question about a tensor that no graph measures."""
    tensor = batch.tensor_of(question.key)
    if tensor is None:
        detail = batch.detail_of(question.key)
        is_mask = question.about == "mask" and detail is not None and not detail.posinf_count
        return Range(0.0, detail.largest_finite or 0.0) if is_mask and detail else None
    if question.about == "mask":
        return _finite_part_of_mask(tensor)
    number = range_of(tensor)
    if question.about == "range":
        return number if isinstance(number, Range) else None
    return _extreme(tensor, number)


def _finite_part_of_mask(tensor: Tensor) -> Range | None:
    """The range of a mask's finite elements; None if it holds +inf."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_nested
    if is_plain and tensor.layout is torch.strided and dtype_of(tensor) in LIMITS:
        with own_arithmetic():  # a single transfer, because each healthy batch asks
            finite = tensor.masked_fill(tensor == -math.inf, 0).abs().amax()
            most, largest = torch.stack([tensor.amax(), finite]).tolist()
        return None if most == math.inf else Range(0.0, largest)
    detail = describe(tensor)
    return None if detail.posinf_count else Range(0.0, detail.largest_finite or 0.0)


def _extreme(tensor: Tensor, number: Range | str) -> float | None:
    """Its largest magnitude, if that is NaN, inf or the dtype's limit."""
    if isinstance(number, str):
        return None
    limit = limit_of(dtype_of(tensor))
    return number.abs_max if number.severity or number.abs_max == limit else None
