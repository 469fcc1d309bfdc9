"""The events of a batch: a graph runs, an operation runs between graphs, a module returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from fxguard.batch.dataflow import DataFlow, ranges_of
from fxguard.batch.draws import Draws
from fxguard.batch.keys import Key
from fxguard.errors import InternalError
from fxguard.graph import nodes
from fxguard.graph.random_state import RandomState
from fxguard.measure import eager, native, traceable
from fxguard.plan.plan import FramePlan, Plan, RowPlan, Step, Value, link
from fxguard.records import NOT_MEASURED, Range, Role
from fxguard.source.lines import Place, source_at

__all__ = [
    "EXCHANGED",
    "Event",
    "GraphRun",
    "ModuleReturn",
    "ModuleRow",
    "Postponed",
    "UncapturedOperation",
    "expect_rows",
]

# In the place of a version: other ranks have written the tensor, which no version tells.
EXCHANGED = -1

# The ranges of values that only a second run of a graph can see, by index in its plan.
LookAgain = Callable[["GraphRun"], Mapping[int, Range | str]]


class Event:
    """The interface of events, for use once the numbers of their batch were read."""

    __slots__ = ()

    def add_to(self, flow: DataFlow, index: int, look_again: LookAgain | None) -> None:
        """Add its values, operations and frames to the data flow of the batch.

        Args:
            flow: the data flow with all earlier events.
            index: index of this event in the batch.
            look_again: see :func:`fxguard.batch.assemble.assemble`.
        """
        raise NotImplementedError

    def frame_count(self, of_operations: bool) -> int:
        """How many frames it has at least, with or without those of operations."""
        raise NotImplementedError

    def identity(self) -> Hashable | None:
        """A key that is equal for equal events of two batches, whatever their numbers.

        None if a verdict depends on more than that.
        """
        return None

    def operations(self) -> set[tuple[str, str]]:
        """Module and kind of each operation that it may have run."""
        return set()

    def unmeasured(self, between: Sequence[float]) -> int:
        """How many operations made results that could not be measured.

        Args:
            between: the largest magnitude of each value of ``Batch.values``.
        """
        return 0

    def reads(self) -> Iterable[Key]:
        """Values of earlier events, or between graphs, that its operations have read."""
        return ()

    def suspects(self, flow: DataFlow, index: int, read: Collection[int]) -> list[Key]:
        """Values that may be the reason why the forward raised.

        Args:
            flow: the data flow of the batch.
            index: index of this event in the batch.
            read: values of the flow that some operation has read.
        """
        return []


@dataclass(slots=True)
class Postponed:
    """The postponed statistics of a run of which only the graph's outputs were measured."""

    values: tuple[int, ...]  # values of the plan that left the graph
    leaving: Any  # their ranges as measured; gathered once read
    ways: Callable[[], Iterable[Callable[..., Any]]]  # checked forms of the graph, best first
    # Values of the plan that uncopied inputs held before the graph wrote them.
    overwritten: tuple[int, ...] = ()


@dataclass(slots=True)
class GraphRun(Event):
    """One run of a captured graph.

    The backend that runs the graph creates it and sets ``measured``.
    :class:`~fxguard.batch.batch.Batch` links it to earlier events (``inputs``, ``derived``), brings
    its numbers to the host, and drops ``args`` and ``random_state`` at the end.
    :mod:`fxguard.rerun.whole_graph` replaces ``plan`` and ``statistics`` together, once, if they
    were postponed. All of this happens in the thread of the batch.
    """

    plan: Plan
    graph_module: GraphModule  # as it was captured, without checks
    measured: eager.Numbers  # by the checks of the plan
    # Its arguments, with copies of those that it wrote; None once the batch is closed.
    args: tuple[Any, ...] | None
    random_state: RandomState | None  # before the run, if the graph draws random numbers
    names: tuple[str, str]  # the module it was captured in, and the one it ran in
    calls: tuple[str, ...]  # module calls around it that no graph contains
    live: tuple[Any, ...] = ()  # the original arguments, until the batch has linked them
    inputs: dict[int, Key] = field(default_factory=dict)  # values made by an earlier event
    derived: dict[int, Key] = field(default_factory=dict)  # values in the memory of an earlier one
    # Of these, what the memory holds besides: other ranks have written a part of it.
    besides: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    # If the graph raised, the values that the raising operation had read.
    stopped_at: tuple[int, ...] = ()
    raised: FramePlan | None = None  # the raising operation
    postponed: Postponed | None = None  # how to get the statistics when they are needed
    # Why it may not run again: it would start differently, or gave other numbers; "" if it may.
    not_again: str = ""
    held_as: str = ""  # the name that a script has for the model
    is_compiled: bool = False  # whether a compiled form of the captured graph ran
    # How often each item of `args` was written when the graph had run; None if nobody looked.
    # `EXCHANGED` where other ranks have sent it something since.
    versions: tuple[int | None, ...] | None = None
    # What the compiled graph drew; None if it draws nothing, or draws in every run as Python does.
    draws: Draws | None = None

    @property
    def statistics(self) -> Tensor:
        """The numbers as a tensor, ``[len(plan.checks), 2]``. A healthy batch needs none."""
        self.measured = statistics = eager.as_tensor(self.measured)
        return statistics

    @statistics.setter
    def statistics(self, statistics: Tensor) -> None:
        self.measured = statistics

    @property
    def numbers(self) -> Tensor:
        """The measured numbers: the statistics, or those of the graph's outputs."""
        if self.postponed is None:
            return self.statistics
        return eager.as_tensor(self.postponed.leaving)

    @property
    def ranges(self) -> list[Range | str]:
        """The range of each value of the plan, or why there is none."""
        if self.postponed is None:
            return ranges_of(self.plan, self.statistics)
        found: list[Range | str] = [value.note or NOT_MEASURED for value in self.plan.values]
        for value, pair in zip(self.postponed.values, self.numbers.tolist(), strict=True):
            found[value] = traceable.decode(*pair)
        return found

    def is_finite(self) -> bool:
        """Whether no measured number is NaN or inf, once the numbers were read."""
        numbers = self.measured if self.postponed is None else self.postponed.leaving
        return (
            native.all_finite(numbers) if type(numbers) is bytearray else eager.are_finite(numbers)
        )

    def writes(self, index: int) -> Iterator[tuple[Key, Key | None]]:
        """Inputs that it wrote, as pairs: the value before the run, and at its end.

        Args:
            index: index of this event in its batch.
        """
        entered = {value.argument: local for local, value in enumerate(self.plan.values)}
        for position, written in self.plan.written:
            now = None if written is None else Key(index, written)
            yield Key(index, entered[position]), now

    def read(self) -> None:
        """Bring the numbers to the host."""
        postponed, measured = self.postponed, self.measured
        if postponed is not None:
            leaving = postponed.leaving
            numbers = eager.gathered(leaving) if isinstance(leaving, list) else leaving
            postponed.leaving = _on_host(numbers, len(postponed.values))
        elif type(measured) is not bytearray or len(measured) != len(self.plan.checks) * eager.ROW:
            self.measured = _on_host(measured, len(self.plan.checks))

    def exchanged(self, memory: int) -> None:
        """Note that other ranks have sent numbers into some memory: no version tells."""
        args = self.args or ()
        if self.versions is not None and any(nodes.memory_of(x) == memory for x in args):
            pairs = zip(self.versions, args, strict=True)
            self.versions = tuple(
                EXCHANGED if nodes.memory_of(x) == memory else version for version, x in pairs
            )

    def close(self) -> None:
        """Release its arguments, so that it cannot run again."""
        self.args, self.live = None, ()
        self.random_state = None
        if self.draws is not None:
            self.draws.let_go()

    def running_name(self, name: str) -> str:
        """The name of the module that runs in place of one that the graph was captured with.

        A graph captured in one module may run for another of the same class.
        """
        captured, running = self.names
        if captured == running:
            return name
        if name == captured or name.startswith(captured + "."):
            return running + name[len(captured) :]
        return name

    def add_to(self, flow: DataFlow, index: int, look_again: LookAgain | None) -> None:
        ranges = self.ranges
        if look_again is not None and self.plan.later:
            for local, found in look_again(self).items():
                ranges[local] = found
        place: list[int] = []  # in the flow, for each value of the plan
        for local, (value, found) in enumerate(zip(self.plan.values, ranges, strict=True)):
            key = Key(index, local)
            held = self.inputs.get(local)
            if held is not None and not self._was_replaced(flow.ranges[flow.place[held]], found):
                flow.place[key] = flow.place[held]
            else:
                flow.add_value(key, self._running_value(local, value), found)
            place.append(flow.place[key])
            if local in self.derived:
                held_before = (self.derived[local], *self.besides.get(local, ()))
                origins = tuple(flow.place[key] for key in held_before)
                flow.steps.append(link(self.names[1], origins, place[local]))
        steps_before = len(flow.steps)
        for step in self.plan.steps:
            flow.steps.append(
                replace(
                    step,
                    module=self.running_name(step.module),
                    inputs=tuple(place[value] for value in step.inputs),
                    outputs=tuple(place[value] for value in step.outputs),
                )
            )
        for frame in (*self.plan.frames, *([] if self.raised is None else [self.raised])):
            flow.frames.append(
                replace(
                    frame,
                    name=self.running_name(frame.name),
                    rows=tuple(
                        row if row.value is None else replace(row, value=place[row.value])
                        for row in frame.rows
                    ),
                    step=None if frame.step is None else frame.step + steps_before,
                    calls=(*self.calls, *frame.calls),
                )
            )

    def _was_replaced(self, before: Range | str, found: Range | str) -> bool:
        """Whether a finite input has turned bad since it was made, which no version tells."""
        if self.is_compiled or not isinstance(before, Range) or not isinstance(found, Range):
            return False  # between fused operations a value has more digits
        return found.severity > before.severity

    def running_plan(self) -> tuple[list[Step], list[Value]]:
        """The steps and the values of its plan, with the names of the module that ran."""
        steps = [replace(each, module=self.running_name(each.module)) for each in self.plan.steps]
        values = [self._running_value(local, value) for local, value in enumerate(self.plan.values)]
        return steps, values

    def _running_value(self, local: int, value: Value) -> Value:
        if local in self.derived:
            return replace(value, role=Role.MADE)
        if not value.role.is_standing or self.names[0] == self.names[1]:
            return value
        return replace(value, name=self.running_name(value.name))

    def frame_count(self, of_operations: bool) -> int:
        frames = self.plan.frames
        return len(frames) if of_operations else sum(not frame.is_op for frame in frames)

    def identity(self) -> Hashable | None:
        if self.plan.later:
            return None
        origins = (self.inputs, self.derived, self.besides)
        return id(self.plan), self.names, self.calls, *(tuple(each.items()) for each in origins)

    def operations(self) -> set[tuple[str, str]]:
        return {(self.running_name(step.module), step.kind) for step in self.plan.steps}

    def reads(self) -> Iterable[Key]:
        return (*self.inputs.values(), *self.derived.values())

    def unmeasured(self, between: Sequence[float]) -> int:
        if self.postponed is not None:
            return 0
        highs = self.statistics[:, 1].tolist()
        if traceable.NO_DATA not in highs:
            return 0
        slots = {slot for slot, high in enumerate(highs) if high == traceable.NO_DATA}
        lacking = {i for i, value in enumerate(self.plan.values) if value.slot in slots}
        steps = (step for step in self.plan.steps if step.counts)
        return sum(not lacking.isdisjoint(step.outputs) for step in steps)

    def suspects(self, flow: DataFlow, index: int, read: Collection[int]) -> list[Key]:
        # What the graph returned to Python, or what the raising operation had read.
        values = self.stopped_at or self.plan.outputs
        return [Key(index, value) for value in values if value is not None]


@dataclass(slots=True)
class UncapturedOperation(Event):
    """One operation that ran outside every graph."""

    kind: str
    module: str
    calls: tuple[str, ...]
    place: Place | None  # the user's line
    inputs: list[tuple[str, Key]]  # label and key
    outputs: list[tuple[str, Key]]  # likewise; empty if it raised
    framed: bool
    infinite_literal: bool = False
    limit_literal: bool = False
    literals: tuple[float, ...] = ()
    number_first: bool = False
    counts: bool = True  # see Step

    def add_to(self, flow: DataFlow, index: int, look_again: LookAgain | None) -> None:
        source = None if self.place is None else source_at(self.place)
        flow.steps.append(
            Step(
                kind=self.kind,
                module=self.module,
                inputs=tuple(flow.place[key] for _, key in self.inputs),
                outputs=tuple(flow.place[key] for _, key in self.outputs),
                infinite_literal=self.infinite_literal,
                limit_literal=self.limit_literal,
                literals=self.literals,
                number_first=self.number_first,
                source=source,
                counts=self.counts,
            )
        )
        if not self.framed:
            return
        weights, rows = self._operands(flow)
        rows = [*weights, *rows]
        for label, key in self.outputs:
            named = f"{label} ({flow.labels[key]})" if key in flow.labels else label
            rows.append(RowPlan(named, flow.place[key]))
        if not self.outputs:
            rows.append(RowPlan("output", note="raised"))
        flow.frames.append(
            FramePlan(
                name=self.module,
                kind=self.kind,
                is_op=True,
                rows=tuple(rows),
                source=source,
                step=len(flow.steps) - 1,
                calls=self.calls,
            )
        )

    def _operands(self, flow: DataFlow) -> tuple[list[RowPlan], list[RowPlan]]:
        """The rows of the weights that it read, and of its other inputs, as those of a graph."""
        weights: list[RowPlan] = []
        others: list[RowPlan] = []
        position = 0
        for label, key in self.inputs:
            place = flow.place[key]
            value = flow.values[place]
            if value.role is Role.WEIGHT:
                weights.append(RowPlan(value.name.rpartition(".")[2], place))
            elif label.removeprefix("input[")[:-1].isdigit():
                others.append(RowPlan(f"input[{position}]", place))
                position += 1
            else:
                others.append(RowPlan(label, place))
        return weights, others

    def frame_count(self, of_operations: bool) -> int:
        return int(of_operations and self.framed)

    def identity(self) -> Hashable | None:
        return (
            self.kind,
            self.module,
            self.calls,
            tuple(self.inputs),
            tuple(self.outputs),
            self.infinite_literal,
            self.limit_literal,
            self.literals,
            self.number_first,
            self.counts,
        )

    def operations(self) -> set[tuple[str, str]]:
        return {(self.module, self.kind)}

    def reads(self) -> Iterable[Key]:
        return (key for _, key in self.inputs)

    def unmeasured(self, between: Sequence[float]) -> int:
        found = (between[key.value] == traceable.NO_DATA for _, key in self.outputs)
        return int(self.counts and any(found))

    def suspects(self, flow: DataFlow, index: int, read: Collection[int]) -> list[Key]:
        if not self.outputs:  # it raised
            return [key for _, key in self.inputs]
        return [key for _, key in self.outputs if flow.place[key] not in read]


class ModuleRow(NamedTuple):
    """One item that a module received or returned."""

    label: str
    key: Key | None  # None if it is not a tensor
    note: str  # what it is if not a tensor


@dataclass(slots=True)
class ModuleReturn(Event):
    """A module returned outside every graph, or the root module returned."""

    name: str
    kind: str
    calls: tuple[str, ...]
    rows: list[ModuleRow]

    def add_to(self, flow: DataFlow, index: int, look_again: LookAgain | None) -> None:
        rows = tuple(
            RowPlan(label, None if key is None else flow.place[key], note)
            for label, key, note in self.rows
        )
        flow.frames.append(FramePlan(self.name, self.kind, False, rows, calls=self.calls))

    def frame_count(self, of_operations: bool) -> int:
        # Among operations, it may replace the frame of its only operation.
        return int(not of_operations or not self.calls)

    def identity(self) -> Hashable | None:
        return self.name, self.calls, tuple(self.rows)


def _on_host(numbers: eager.Numbers, count: int) -> eager.Numbers:
    """The numbers of a given count of values, in host memory."""
    if type(numbers) is bytearray and len(numbers) == count * eager.ROW:
        return numbers
    found = eager.as_tensor(numbers).cpu()
    expect_rows(found, count)
    return found


def expect_rows(numbers: Tensor, count: int) -> None:
    """Raise unless there is one row of numbers for each measured value."""
    if numbers.shape != (count, 2):
        raise InternalError(f"{tuple(numbers.shape)} numbers were measured for {count} values")
