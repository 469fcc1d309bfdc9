"""One batch, judged: the rules of :mod:`~fxguard.verdict.origins` on numbers and tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun
from fxguard.formats import limit_of
from fxguard.graph.tables import ADDITIONS
from fxguard.measure.at_hand import dtype_of, range_of
from fxguard.measure.details import Detail, describe
from fxguard.plan.plan import Step
from fxguard.records import Range, Role, Severity
from fxguard.rerun.details import detail_of
from fxguard.verdict import origins
from fxguard.verdict.explain import beyond
from fxguard.verdict.precedents import Answer, Question

__all__ = ["Judgment", "answer"]


class Judgment:
    """The verdict on a batch that is not closed yet.

    Args:
        batch: the batch; its tensors are looked at where numbers do not suffice.
        flow: the same, put together.
        is_ignored: whether the user asked not to hear of an operation.

    Attributes:
        verdict: what was found.
        answers: what had to be asked about tensors that no graph measures.
    """

    def __init__(self, batch: Batch, flow: DataFlow, is_ignored: Callable[[Step], bool]) -> None:
        self.batch = batch
        self.flow = flow
        self.is_ignored = is_ignored
        self.answers: dict[Question, Answer] = {}
        self.verdict = self.judge()
        if overflowed := self.overflowed():
            self.verdict = self.judge(overflowed)

    def judge(self, overflowed: Collection[int] = ()) -> origins.Verdict:
        """Trace bad values back to where they came from."""
        return origins.find_origins(
            self.flow.steps,
            self.flow.values,
            self.severity,
            abs_max=self.abs_max,
            is_mask=self.is_mask,
            reached=self.flow.reached,
            is_ignored=self.is_ignored,
            overflowed=overflowed,
        )

    def range_of(self, value: int) -> Range | None:
        """The range of a value; those of weights are measured now."""
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
        """How bad a value is; what has no range is finite."""
        found = self.range_of(value)
        return Severity.FINITE if found is None else found.severity

    def abs_max(self, value: int) -> float:
        """The largest magnitude of a value; 0 for what has no range."""
        found = self.range_of(value)
        return 0.0 if found is None else found.abs_max

    def name_of(self, value: int) -> str:
        """What the user calls a value that no operation made."""
        role, name = self.flow.values[value].role, self.flow.values[value].name
        if role is not Role.INPUT:
            return f"{role.value} {name}"
        key = self.flow.keys[value]
        tensor = self.batch.copied.get(key, self.batch.tensor_of(key))
        if tensor is not None and self.batch.call is not None:
            with contextlib.suppress(Exception):  # whatever a container of the user's raises
                if argument := self.batch.call.name_of(tensor):
                    return argument
        if not name.startswith("input["):
            return f"input `{name}`"
        readers = (step for step in self.flow.steps if value in step.inputs)
        reader = next(readers, None)
        if reader is None or not key.is_between_graphs:
            return name
        return f"{name} of {reader.kind}" + (f" in {reader.module}" if reader.module else "")

    def beyond_autocast(self, blame: origins.Blame) -> list[int]:
        """Finite operands of an operation that autocast cast to a dtype that cannot hold them."""
        operands = beyond(self.flow, blame, self.abs_max)
        return operands if operands and self._was_autocast(blame.value) else []

    def _was_autocast(self, value: int) -> bool:
        if self.batch.autocast or torch._C._is_any_autocast_enabled():
            return True
        run = self.batch.run_of(self.flow.keys[value])
        if run is None:
            return False
        targets = (getattr(n.target, "__name__", "") for n in run.graph_module.graph.nodes)
        return any("autocast" in name for name in targets)

    def is_mask(self, value: int) -> bool:
        """Whether a tensor that nobody made in this batch holds -inf, and no +inf.

        What the model writes holds what an earlier batch left there, which is no mask.
        """
        if value in self.left_before:
            return False
        question = Question(self.flow.keys[value], "is mask")
        self.answers[question] = found = answer(self.batch, question)
        return bool(found)

    @functools.cached_property
    def left_before(self) -> set[int]:
        """Inputs and buffers that hold what an earlier batch has computed, such as a KV cache."""
        flow = self.flow
        makers = {value: step for step in flow.steps for value in step.outputs}
        written: set[int] = set()
        for index, event in enumerate(self.batch.events):
            for before, now in event.writes(index) if isinstance(event, GraphRun) else ():
                if now is None or not _writes_infinity(makers, flow.place[now]):
                    written.add(flow.place[before])
        # A buffer that several graphs read is a value of each.
        names = {flow.values[v].name for v in written if flow.values[v].role is Role.BUFFER}
        return written | {
            index
            for index, value in enumerate(flow.values)
            if value.role is Role.BUFFER and value.name in names
        }

    def overflowed(self) -> set[int]:
        """Values that look like a mask that became infinite, but hold +inf."""
        flow, verdict = self.flow, self.verdict
        steps = [flow.steps[blame.step] for blame in verdict.origins if blame.step is not None]
        todo = [value for step in steps for value in step.inputs]
        maker = {value: step for step in flow.steps for value in step.outputs}
        overflowed: set[int] = set()
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value in seen or value not in verdict.intended or value not in maker:
                continue
            seen.add(value)
            step = maker[value]
            todo += step.inputs
            of_finite = verdict.intended.isdisjoint(step.inputs)
            if of_finite and step.kind in ADDITIONS and not step.infinite_literal:
                detail = self.detail(origins.Blame(value, 0, Severity.INF))
                if detail is not None and detail.posinf_count:
                    overflowed.add(value)
        return overflowed

    def detail(self, blame: origins.Blame) -> Detail | None:
        """What a blamed tensor holds, where that can still be seen."""
        key = self.flow.keys[blame.value]
        if blame.step is None:
            tensor = self.batch.tensor_of(key)
            return None if tensor is None else describe(tensor)
        run = self.batch.run_of(key)
        return self.batch.details.get(key.value) if run is None else detail_of(run, key.value)


def _writes_infinity(makers: Mapping[int, Step], value: int) -> bool:
    """Whether a value was written with an infinity on purpose, at the last or before."""
    todo = [value]
    while todo:
        step = makers.get(todo.pop())
        if step is not None:
            if step.infinite_literal:
                return True
            todo += step.inputs[:1] if step.counts else step.inputs  # written, or put together
    return False


def answer(batch: Batch, question: Question) -> Answer:
    """What a judgment has to know of a tensor that no graph measures."""
    tensor = batch.tensor_of(question.key)
    if question.about == "is mask":
        return tensor is not None and describe(tensor).posinf_count == 0
    return None if tensor is None else _extreme(tensor, range_of(tensor))


def _extreme(tensor: Tensor, number: Range | str) -> float | None:
    """Its largest magnitude, where that is NaN, inf or the dtype's limit."""
    if isinstance(number, str):
        return None
    limit = limit_of(dtype_of(tensor))
    return number.abs_max if number.severity or number.abs_max == limit else None
