"""What graph runs, operations between graphs and returning modules answer for themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, UncapturedOperation, expect_rows
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.errors import InternalError
from fxguard.measure import eager
from fxguard.plan.plan import Plan


class Block(nn.Module):
    """A module with an operation of its own, and one that is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


class Broken(nn.Module):
    """A graph break between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) + 1


def batch_of(stance: str, **options: Any) -> tuple[Batch, list[fxguard.types.Frame]]:
    model = fxguard.instrument(Broken(), **options)
    with torch.compiler.set_stance(stance):
        model(torch.ones(2, 3))
    guard = fxguard.guard_of(model)
    assert guard.recorder.last_batch is not None
    return guard.recorder.last_batch, guard.frames()


@pytest.mark.parametrize("granularity", ["op", "module"])
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_no_more_frames_are_promised_than_there_are(stance: str, granularity: str) -> None:
    """Who counts frames without rendering them may drop earlier batches, and none too many."""
    batch, frames = batch_of(stance, granularity=granularity)
    promised = sum(event.frame_count(granularity == "op") for event in batch.events)
    assert 0 < promised <= len(frames)


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_operations_are_those_that_frames_show(stance: str) -> None:
    """Captured or not, each with the module that ran."""
    batch, frames = batch_of(stance)
    ran = {operation for event in batch.events for operation in event.operations()}
    assert {("first", "mul"), ("second", "mul"), ("", "add")} <= ran
    assert {(frame.name, frame.kind) for frame in frames if frame.is_op} <= ran
    assert batch.uncaptured() == sum(isinstance(e, UncapturedOperation) for e in batch.events)
    assert batch.runs == [event for event in batch.events if isinstance(event, GraphRun)]


@pytest.mark.parametrize(
    ("captured", "running", "name", "expected"),
    [
        ("layers.0", "layers.3", "layers.0", "layers.3"),
        ("layers.0", "layers.3", "layers.0.mlp.weight", "layers.3.mlp.weight"),
        ("layers.0", "layers.3", "layers.01.mlp", "layers.01.mlp"),
        ("layers.0", "layers.3", "embedding", "embedding"),
        ("layers.0", "layers.0", "layers.0.mlp", "layers.0.mlp"),
    ],
)
def test_a_graph_bears_the_names_of_the_module_that_runs(
    captured: str, running: str, name: str, expected: str
) -> None:
    """A graph captured in one layer runs for all layers of its class."""
    graph = torch.fx.symbolic_trace(nn.Identity())
    run = GraphRun(Plan(), graph, torch.zeros(0, 2), (), None, (captured, running), ())
    assert run.running_name(name) == expected


def test_equal_batches_have_equal_identities() -> None:
    """In graphs and between them: such batches are judged once."""
    model = fxguard.instrument(Block())
    for stance in ("default", "force_eager"):
        found = []
        for _ in range(2):
            with torch.compiler.set_stance(stance):
                model(torch.ones(2, 3))
            batch = fxguard.guard_of(model).recorder.last_batch
            assert batch is not None
            found.append([event.identity() for event in batch.events])
        assert found[0] == found[1]
        assert None not in found[0]


def test_a_closed_run_holds_no_tensor_of_the_forward() -> None:
    """Its numbers stay."""
    batch, _ = batch_of("default")
    for run in batch.runs:
        assert run.args is None
        assert run.live == ()
        assert run.numbers.shape == (len(run.plan.checks), 2)


def test_keys_say_where_they_belong() -> None:
    """A key is a plain pair, with names."""
    assert Key(BETWEEN_GRAPHS, 3).is_between_graphs
    assert not Key(0, 3).is_between_graphs
    assert Key(0, 3) == (0, 3)


def test_numbers_have_to_fit() -> None:
    """One row for each value."""
    expect_rows(torch.zeros(3, 2), 3)
    with pytest.raises(InternalError, match="numbers were measured for 4 values"):
        expect_rows(torch.zeros(3, 2), 4)


def test_numbers_at_hand_have_to_fit_too() -> None:
    """A run with a number more or less than its plan has checks is an error of fxguard."""
    run = batch_of("default")[0].runs[0]
    numbers = eager.gathered([(0.5, 2.0)] * (len(run.plan.checks) - 1))
    for wrong in (numbers, eager.as_tensor(numbers)):
        with pytest.raises(InternalError, match="numbers were measured for"):
            replace(run, measured=wrong).read()


@pytest.mark.parametrize("high", [2.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32])
def test_a_run_knows_whether_its_numbers_are_finite(high: float, dtype: Any) -> None:
    """Whichever way they are at hand; and as a tensor they are the same."""
    run = batch_of("default")[0].runs[0]
    pairs = [(0.5, 2.0)] * (len(run.plan.checks) - 1) + [(0.5, high)]
    run = replace(run, measured=eager.gathered(pairs))
    if dtype is not None:
        run.statistics = run.statistics.to(dtype)
    run.read()
    assert run.is_finite() is math.isfinite(high)
    assert torch.equal(run.statistics.double(), torch.tensor(pairs).double()) or math.isnan(high)
    assert run.is_finite() is math.isfinite(high)
