"""Turns planned rows and the ranges of values into frames with numbers, for reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard.batch.dataflow import DataFlow, ranges_of
from fxguard.batch.fingerprints import Fingerprints
from fxguard.batch.model_reference import reference_to
from fxguard.measure import traceable
from fxguard.measure.at_hand import dtype_of, range_of
from fxguard.plan.plan import FramePlan, Plan, Value
from fxguard.records import Frame, Range, Role, Row

__all__ = ["FrameView", "frames_of", "render", "row_of"]


class FrameView:
    """Which frames of a batch to show, and with which model.

    Args:
        model: for the rows of weights and buffers; it is not kept alive.
        of_operations: whether frames of operations are shown; if not, only those of modules.
        phase: of the frames.
    """

    def __init__(
        self, model: Module | None = None, of_operations: bool = True, phase: str = "forward"
    ) -> None:
        self._model = reference_to(model)
        self.of_operations = of_operations
        self.phase = phase

    @property
    def model(self) -> Module | None:
        """The model; None if there is none, or if it is gone."""
        return self._model()

    def shows(self, frame: FramePlan) -> bool:
        """Whether a frame is shown."""
        return self.of_operations or not frame.is_op

    def shown(self, flow: DataFlow) -> list[int]:
        """The indices of the frames that are shown."""
        return [position for position, frame in enumerate(flow.frames) if self.shows(frame)]

    def in_reverse(self, flow: DataFlow, position: int) -> Iterator[Frame]:
        """The frames of a batch up to one, the last first, with those of its parts in between.

        Args:
            flow: the data flow of the batch.
            position: index of the last frame in ``flow.frames``.
        """
        parts = [(before, part) for before, part in flow.parts if before <= position]
        for index, shown in reversed([*enumerate(self.shown(flow))]):
            if shown > position:
                continue
            while parts and parts[-1][0] > shown:
                yield from reversed(parts.pop()[1].frames())
            yield self.render(flow, shown, index)
        while parts:
            yield from reversed(parts.pop()[1].frames())

    def render(
        self,
        flow: DataFlow,
        position: int,
        index: int,
        unlike: Callable[[Tensor], str] | None = None,
        prints: Fingerprints | None = None,
    ) -> Frame:
        """One frame of a batch with its numbers.

        Args:
            flow: the data flow of the batch.
            position: the frame's index in it.
            index: its place among the shown frames.
            unlike: see :func:`render`.
            prints: likewise.
        """
        planned = flow.frames[position]
        frame = render(
            *(planned, flow.values, flow.ranges, self.model, unlike, prints),
            held_as=flow.held_as,
        )
        if flow.intended:
            frame = _with_masks(frame, planned, flow)
        return replace(frame, batch_number=flow.batch_number, index=index, phase=self.phase)


def _with_masks(rendered: Frame, frame: FramePlan, flow: DataFlow) -> Frame:
    """A frame with the rows marked that are infinite on purpose: they follow the parameters."""
    own = len(rendered.rows) - len(frame.rows)
    rows = list(rendered.rows)
    for place, row in enumerate(frame.rows, own):
        if row.value in flow.intended and rows[place].abs_max == math.inf:
            rows[place] = replace(rows[place], mask=True)
    return replace(rendered, rows=tuple(rows))


def frames_of(plan: Plan, statistics: Tensor, model: Module | None = None) -> list[Frame]:
    """The frames of one run of a graph that :func:`fxguard.insert_checks` made.

    Args:
        plan: the plan that ``insert_checks`` returned.
        statistics: the second output of the graph, shape ``[len(plan.checks), 2]``.
        model: the model of the graph, for the rows of weights and buffers.
    """
    ranges = ranges_of(plan, statistics)
    return [render(frame, plan.values, ranges, model) for frame in plan.frames]


def render(
    frame: FramePlan,
    values: Sequence[Value],
    ranges: Sequence[Range | str],
    model: Module | None,
    unlike: Callable[[Tensor], str] | None = None,
    prints: Fingerprints | None = None,
    *,
    held_as: str = "",
) -> Frame:
    """One frame with its numbers.

    Args:
        frame: the frame.
        values: the values that its rows refer to.
        ranges: the range of each value.
        model: the model, for the rows of weights and buffers, which no graph measures.
        unlike: says why a weight or buffer may have changed since the batch; "" if it has not. If
            not given, none has.
        prints: the fingerprints of the values; None if rows have none.
        held_as: the name of the model, if names begin with it.
    """

    def standing_row(label: str, tensor: Tensor) -> Row:
        note = unlike(tensor) if unlike is not None else ""
        row = row_with(label, note or range_of(tensor), dtype_of(tensor))
        return row if prints is None else prints.of_tensor(row, tensor)

    def measured_row(label: str, value: int, dtype: str) -> Row:
        row = row_with(label, ranges[value], dtype)
        return row if prints is None else prints.of_value(row, value)

    rows = []
    if not frame.is_op and isinstance(module := _at(model, frame.name, held_as), Module):
        rows += parameter_rows(frame.name, module, values, ranges, standing_row, measured_row)
    for row in frame.rows:
        if row.value is None:
            rows.append(Row(row.label, note=row.note))
            continue
        number, value = ranges[row.value], values[row.value]
        standing = _at(model, value.name, held_as) if value.role.is_standing else None
        if standing is not None and not isinstance(number, Range):
            rows.append(standing_row(row.label, standing))
        else:
            rows.append(measured_row(row.label, row.value, value.dtype))
    return Frame(frame.name, frame.kind, frame.is_op, tuple(rows), frame.source)


def parameter_rows(
    name: str,
    module: Module,
    values: Sequence[Value],
    ranges: Sequence[Range | str],
    standing_row: Callable[[str, Tensor], Row],
    measured_row: Callable[[str, int, str], Row],
) -> list[Row]:
    """The rows of a module's own parameters; under FSDP, as measured in the graph."""
    parameters = dict(module.named_parameters(recurse=False))
    measured = {}
    if any(map(traceable.inside, parameters.values())):
        measured = {
            value.name: index
            for index, (value, number) in enumerate(zip(values, ranges, strict=True))
            if value.role is Role.WEIGHT and isinstance(number, Range)
        }
    rows = []
    for label, parameter in parameters.items():
        index = measured.get(f"{name}.{label}".lstrip("."))
        if index is None:
            rows.append(standing_row(label, parameter))
        else:
            rows.append(measured_row(label, index, dtype_of(parameter)))
    return rows


def _at(model: Module | None, name: str, held_as: str = "") -> Any:
    """The submodule, parameter or buffer with a qualified name; None if there is none."""
    value: Any = model
    for part in filter(None, name.removeprefix(held_as).split(".")):
        value = getattr(value, part, None)
    return value


def row_of(label: str, tensor: Tensor) -> Row:
    """A row for a tensor in memory."""
    return row_with(label, range_of(tensor), dtype_of(tensor))


def row_with(label: str, number: Range | str, dtype: str) -> Row:
    """A row with a range, or the reason why there is none."""
    if isinstance(number, str):
        return Row(label, note=number, dtype=dtype)
    return Row(label, number.abs_min, number.abs_max, dtype=dtype)
