"""The data flow of a batch: one numbering for all of its events."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.assemble import assemble
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.keys import Key
from fxguard.plan.plan import FramePlan, RowPlan, Step, Value
from fxguard.records import Range, Role, Source


class Broken(nn.Module):
    """Two graphs, or none, and a view that leads from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x.view(2, 4)).exp()


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_values_are_numbered_once_and_read_after_they_are_made(stance: str) -> None:
    """Each value has one key; what one graph made and the next one read is one value."""
    model = fxguard.instrument(Broken())
    with torch.compiler.set_stance(stance):
        model(torch.ones(2, 4))
    batch = fxguard.guard_of(model).recorder.last_batch
    assert batch is not None
    flow = assemble(batch)
    assert [flow.place[key] for key in flow.keys] == list(range(len(flow.values)))
    made: set[int] = set()
    for step in flow.steps:
        assert all(value in made or flow.values[value].role.is_given for value in step.inputs)
        made.update(step.outputs)
    assert flow.results
    assert set(flow.results) <= made
    linear, exp = flow.steps[0], flow.steps[-1]
    assert (linear.kind, exp.kind) == ("linear", "exp")
    # From the last operation back to the first, through the break.
    reached, todo = set[int](), list(exp.inputs)
    makers = {value: step for step in flow.steps for value in step.outputs}
    while todo:
        value = todo.pop()
        reached.add(value)
        todo += makers[value].inputs if value in makers else ()
    assert set(linear.outputs) <= reached


def three_steps() -> DataFlow:
    flow = DataFlow(0)
    for index in range(4):
        role = Role.MADE if index else Role.INPUT
        flow.add_value(Key(0, index), Value(role, f"v{index}"), Range(0.0, 1.0))
    for index in range(3):
        flow.steps.append(Step(f"op{index}", "m", (index,), (index + 1,)))
    return flow


def frame_of(step: int) -> FramePlan:
    return FramePlan("m", f"op{step}", True, (RowPlan("output", step + 1),), step=step)


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_an_operation_without_a_frame_gets_one_at_its_place(hidden: int) -> None:
    """Such as one that joins parts: it is shown where it is to blame."""
    flow = three_steps()
    flow.frames = [frame_of(step) for step in range(3) if step != hidden]
    flow.show_step(hidden)
    assert [frame.kind for frame in flow.frames] == ["op0", "op1", "op2"]
    shown = flow.frames[hidden]
    assert [(row.label, row.value) for row in shown.rows] == [
        ("input[0]", hidden),
        ("output", hidden + 1),
    ]
    flow.show_step(hidden)  # it has one now
    assert len(flow.frames) == 3


def test_frames_of_what_did_not_run_are_dropped() -> None:
    """A branch that was not taken has no numbers."""
    flow = three_steps()
    flow.frames = [frame_of(step) for step in range(3)]
    flow.ranges[2] = "not run"
    flow.drop_frames_without_numbers()
    assert [frame.kind for frame in flow.frames] == ["op0", "op2"]


def test_an_operation_without_a_line_gets_that_of_the_call() -> None:
    """Those that have one keep it."""
    own, caller = Source("model.py", 3, "y = x * 2"), Source("train.py", 7, "model(x)")
    flow = three_steps()
    flow.steps[0] = Step("op0", "m", (0,), (1,), source=own)
    flow.frames = [frame_of(1), FramePlan("m", "Block", False, ())]
    flow.add_caller(caller)
    assert [step.source for step in flow.steps] == [own, caller, caller]
    assert [frame.source for frame in flow.frames] == [caller, None]
