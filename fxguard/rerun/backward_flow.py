"""The backward of one graph as a data flow, which the rules for a forward can read.

Each operation's backward is a step: it reads the gradients of what the operation made, and makes
one for each operand. The gradient of a value is another step, the sum of what its readers returned.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxguard.batch.dataflow import DataFlow, joined
from fxguard.batch.frames import FrameView
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.keys import Key
from fxguard.plan.blame import Blame
from fxguard.plan.plan import FramePlan, Place, RowPlan, Step, Value
from fxguard.records import GRADIENT, Frame, Range, Role, Severity
from fxguard.rerun.edges import BackwardOf, Edge, Gradients
from fxguard.source.lines import source_of_trace

__all__ = ["SUM", "BackwardFlow", "came_from"]

SUM = "sum of gradients"  # the kind of a step
NO_GRADIENT = "None"  # the note of a value that got none
VIEW = FrameView(phase="backward")


class BackwardFlow:
    """The gradients of a second run as a data flow, in order of the backward.

    Two runs of one graph number their values and steps alike.

    Args:
        kept: the graph run.
        gradients: the gradients of its second run.

    Attributes:
        flow: the data flow. It has reached the inputs of the graph.
        came_in: values that came in from outside the graph, by position among its outputs.
        arguments: values that reached an input, by position among the inputs of the graph.
    """

    def __init__(self, kept: KeptRun, gradients: Gradients) -> None:
        self.kept = kept
        self.gradients = gradients
        self.flow = DataFlow(kept.batch_number)
        self._planned = _steps_by_place(kept)
        self._operations: dict[int, BackwardOf] = {}  # by step
        self._edges: dict[int, Edge] = {}  # by value
        # The frames of operations that only view their operand, or got no gradient, by step.
        self._hidden: dict[int, FramePlan] = {}
        self._terms: dict[int, list[int]] = {}  # by value of the forward
        self._sums: dict[int, int] = {}  # by value of the forward
        self.came_in: dict[int, int] = {}
        for position, value in gradients.outputs.items():
            number = self._add(Role.INPUT, value, gradients.incoming[position])
            self.came_in[position] = number
            self._terms.setdefault(value, []).append(number)
        for operation in reversed(gradients.operations):
            self._follow(operation)
        self.arguments = {
            position: self._sum(value) for position, value in gradients.arguments.items()
        }
        self.flow.reached = list(self.arguments.values())

    def _add(self, role: Role, of: int, found: Range | str) -> int:
        """Add the gradient of a value of the forward, or a part of it."""
        number = len(self.flow.values)
        dtype, name = self.gradients.dtypes.get(of, ""), self.gradients.weights.get(of, "")
        self.flow.add_value(Key(self.kept.index, number), Value(role, name, dtype), found)
        return number

    def _sum(self, of: int) -> int:
        """The gradient of a value of the forward, once all of its readers have been followed."""
        if of not in self._sums:
            found = self.gradients.totals.get(of, NO_GRADIENT)
            self._sums[of] = number = self._add(Role.MADE, of, found)
            terms = tuple(term for term in self._terms.get(of, ()) if self.range_of(term))
            step = Step(SUM, "", terms, (number,), counts=len(terms) > 1)
            self.flow.steps.append(step)
        return self._sums[of]

    def _follow(self, operation: BackwardOf) -> None:
        """Add the backward of one operation, and its frame."""
        read = [self._sum(value) for value in operation.made]
        returned = []
        for edge in operation.edges:
            number = self._add(Role.MADE, edge.value, edge.range or NO_GRADIENT)
            returned.append(number)
            self._edges[number] = edge
            self._terms.setdefault(edge.value, []).append(number)
        planned, index = self.planned(operation), len(self.flow.steps)
        run = self.kept.event
        module = "" if planned is None else joined(run.held_as, run.running_name(planned[1].module))
        call = operation.call
        step = Step(
            call.kind,
            module,
            tuple(filter(self.range_of, read)),
            tuple(filter(self.range_of, returned)),
            literals=tuple(call.literals),
            source=source_of_trace(operation.node.meta.get("stack_trace")),
            node=operation.place[1],
            inside=operation.place[0],
        )
        self.flow.steps.append(step)
        self._operations[index] = operation
        labels = ["output"] if len(read) == 1 else [f"output[{i}]" for i in range(len(read))]
        labels += [edge.label for edge in operation.edges]
        rows = map(self._row, labels, (*read, *returned))
        frame = FramePlan(module, step.kind, True, tuple(rows), step.source, index)
        if step.outputs and planned is not None:
            self.flow.frames.append(frame)
        else:
            self._hidden[index] = frame

    def _row(self, label: str, value: int) -> RowPlan:
        if self.range_of(value) is None:
            return RowPlan(GRADIENT + label, note=NO_GRADIENT)
        return RowPlan(GRADIENT + label, value)

    def range_of(self, value: int) -> Range | None:
        """The range of a value; None if no gradient came there."""
        found = self.flow.ranges[value]
        return found if isinstance(found, Range) else None

    def severity(self, value: int) -> Severity:
        """How bad a value is; where no gradient came, nothing is."""
        found = self.range_of(value)
        return Severity.FINITE if found is None else found.severity

    def planned(self, operation: BackwardOf) -> tuple[int, Step] | None:
        """The step of an operation in the plan of the forward, with its index."""
        return self._planned.get(operation.place)

    def operation_of(self, step: int) -> BackwardOf | None:
        """The operation whose backward a step is; None for a sum."""
        return self._operations.get(step)

    def edge_of(self, blame: Blame) -> tuple[BackwardOf, Edge] | None:
        """The operation whose backward is to blame, and its operand; None if it is none."""
        operation = None if blame.step is None else self._operations.get(blame.step)
        return None if operation is None else (operation, self._edges[blame.value])

    def arguments_made_by(self, key: Key) -> list[int]:
        """The gradients of inputs that an earlier event of the batch made as this value."""
        run = self.kept.event
        values = [run.plan.values[value] for value, made in run.inputs.items() if made == key]
        found = [self.arguments.get(x.argument) for x in values if x.argument is not None]
        return [number for number in found if number is not None]

    def frames(self, up_to: int | None) -> list[Frame]:
        """The frames in order, up to and including that of a step; all of them if it is None."""
        frames = self.flow.frames
        last = len(frames)
        if up_to is not None:
            last = next((i for i, f in enumerate(frames, 1) if (f.step or 0) >= up_to), last)
        return [VIEW.render(self.flow, position, position) for position in range(last)]

    def show(self, step: int) -> None:
        """Show an operation's backward that has no frame, because it is to blame."""
        if step in self._hidden:
            self.flow.frames.append(self._hidden.pop(step))
            self.flow.frames.sort(key=lambda frame: frame.step or 0)

    def frame_of(self, step: int) -> Frame:
        """The frame of an operation's backward."""
        self.show(step)
        position = next(i for i, frame in enumerate(self.flow.frames) if frame.step == step)
        return VIEW.render(self.flow, position, position)


def came_from(
    flows: Sequence[BackwardFlow], flow: DataFlow, value: int
) -> tuple[DataFlow, int] | None:
    """The gradient in a later graph of the same batch that came in as one of these values.

    Args:
        flows: the backward passes of several graphs.
        flow: the data flow of one of them.
        value: index of the value there.

    Returns:
        The data flow of the later graph and the value there, the largest of several.
    """
    backward = next(each for each in flows if each.flow is flow)
    kept = backward.kept
    positions = (position for position, number in backward.came_in.items() if number == value)
    position = next(positions, None)
    made = None if position is None else kept.event.plan.outputs[position]
    if made is None:
        return None
    found = [
        (each.flow, number)
        for each in flows
        if each.kept.batch_number == kept.batch_number
        for number in each.arguments_made_by(Key(kept.index, made))
    ]
    return max(found, key=lambda place: _magnitude(*place), default=None)


def _magnitude(flow: DataFlow, value: int) -> float:
    found = flow.ranges[value]
    return found.abs_max if isinstance(found, Range) else 0.0


def _steps_by_place(kept: KeptRun) -> dict[Place, tuple[int, Step]]:
    """The steps of a graph's plan with their indices; operations with bodies are included."""
    found: dict[Place, tuple[int, Step]] = {}
    for index, step in enumerate(kept.event.plan.steps):
        if step.counts:
            found[step.inside, step.node] = index, step
        for depth, (name, _) in enumerate(step.inside):
            found.setdefault((step.inside[:depth], name), (index, step))
    return found
