"""The data flow of a batch: values, operations and frames of all events in one numbering.

Nothing here runs while the model is healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from fxguard.batch.keys import Key
from fxguard.measure.traceable import NOT_RUN, NOTES, decode
from fxguard.plan.plan import LATER, FramePlan, Plan, RowPlan, Step, Value
from fxguard.records import NOT_MEASURED, Frame, Range, Source

__all__ = ["DataFlow", "joined", "ranges_of"]


class Part(Protocol):
    """The batch of a model, as a part of what a script computed."""

    frames: Callable[[], list[Frame]]


@dataclass(slots=True)
class DataFlow:
    """One batch: operations, values and frames, numbered consecutively."""

    batch_number: int
    values: list[Value] = field(default_factory=list)
    # The range of each value, or why there is none.
    ranges: list[Range | str] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # where each value comes from
    place: dict[Key, int] = field(default_factory=dict)  # index into `values` for each key
    steps: list[Step] = field(default_factory=list)  # in order of execution
    frames: list[FramePlan] = field(default_factory=list)  # in order of display
    results: list[int] = field(default_factory=list)  # values that the model returned
    # Values that left the model: the results, and values written to inputs and buffers.
    reached: list[int] = field(default_factory=list)
    # Those written to inputs and buffers and not returned, with the value before the first write.
    written: dict[int, int] = field(default_factory=dict)
    labels: Mapping[Key, str] = field(default_factory=dict)  # the user's names for values
    intended: frozenset[int] = frozenset()  # values that are infinite on purpose, once judged
    # The batches of models whose outputs were read, with how many frames came before each.
    parts: list[tuple[int, Part]] = field(default_factory=list)
    held_as: str = ""  # what the names of modules, weights and buffers begin with

    def add_value(self, key: Key, value: Value, found: Range | str) -> None:
        """Add and number one value."""
        self.place[key] = len(self.values)
        self.values.append(value)
        self.ranges.append(found)
        self.keys.append(key)

    def add_caller(self, caller: Source) -> None:
        """Give operations with lines only in torch the line that called the model."""
        self.steps = [s if s.source else replace(s, source=caller) for s in self.steps]
        self.frames = [
            frame if frame.source or frame.step is None else replace(frame, source=caller)
            for frame in self.frames
        ]

    def name_model(self, name: str) -> None:
        """Let the names of modules, weights and buffers begin with that of the model."""
        self.held_as = name
        self.steps = [replace(step, module=joined(name, step.module)) for step in self.steps]
        self.frames = [replace(frame, name=joined(name, frame.name)) for frame in self.frames]
        self.values = [
            replace(value, name=joined(name, value.name)) if value.role.is_standing else value
            for value in self.values
        ]

    def drop_frames_without_numbers(self) -> None:
        """Drop the frames of branches that were not taken, and of bodies that were not examined."""
        kept = [self._has_run(frame) for frame in self.frames]
        self.parts = [(sum(kept[:before]), batch) for before, batch in self.parts]
        self.frames = [frame for frame, has_run in zip(self.frames, kept, strict=True) if has_run]

    def _has_run(self, frame: FramePlan) -> bool:
        found = [self.ranges[row.value] for row in frame.rows if row.value is not None]
        return NOTES[NOT_RUN] not in found and LATER not in found

    def show_step(self, index: int) -> None:
        """Give a frame to an operation without one, such as one that joins parts."""
        if any(frame.step == index for frame in self.frames):
            return
        step = self.steps[index]
        if len(step.outputs) == 1:
            rows = [RowPlan("output", step.outputs[0])]
        else:
            rows = [RowPlan(f"output[{i}]", value) for i, value in enumerate(step.outputs)]
        rows[:0] = [RowPlan(f"input[{i}]", value) for i, value in enumerate(step.inputs)]
        frame = FramePlan(step.module, step.kind, True, tuple(rows), step.source, index)

        def comes_after(other: FramePlan) -> bool:
            if other.step is not None:
                return other.step > index
            return any(row.value in step.outputs for row in other.rows)

        after = (place for place, other in enumerate(self.frames) if comes_after(other))
        self.frames.insert(next(after, len(self.frames)), frame)


def joined(name: str, inside: str) -> str:
    """A qualified name with the name of its model in front."""
    return ".".join(filter(None, (name, inside)))


def ranges_of(plan: Plan, statistics: Tensor) -> list[Range | str]:
    """The range of each value of a plan, or why there is none.

    Args:
        plan: the plan of a graph.
        statistics: the numbers of one run of the graph, shape ``[len(plan.checks), 2]``.
    """
    numbers = statistics.tolist()
    return [
        value.note or NOT_MEASURED if value.slot is None else decode(*numbers[value.slot])
        for value in plan.values
    ]
