"""What a bad value of a graph held: counted in a second run that repeats the first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.records import Severity
from fxguard.rerun.details import detail_of, numbers_inside

X = torch.tensor([[1.0, 0.0, -1.0], [4.0, 0.0, 2.0]])


class Logs(nn.Module):
    """A logarithm of zeros, and of a negative number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x) * 2


class Shifted(nn.Module):
    """A finite number on the way to the bad one."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + 1
        return torch.log(x * 0) * shifted


def run_of(model: nn.Module, x: Tensor) -> GraphRun:
    """One run of a captured graph, read and not closed."""
    graph = torch.fx.symbolic_trace(model)
    checked, plan = fxguard.insert_checks(graph)
    *_, statistics = checked(x)
    run = GraphRun(plan, graph, statistics, (x,), None, ("", ""), (), live=(x,))
    batch = Batch(0)
    batch.graph_ran(run, ())
    batch.read()
    return run


def made_by(run: GraphRun, kind: str) -> int:
    (step,) = (step for step in run.plan.steps if step.kind == kind)
    return step.outputs[0]


def test_counts_are_those_of_the_tensor() -> None:
    """Against torch's own tests of the same tensor."""
    run, expected = run_of(Logs(), X), torch.log(X)
    detail = detail_of(run, made_by(run, "log"))
    assert detail is not None
    assert detail.nan_count == int(expected.isnan().sum()) == 1
    assert detail.neginf_count == int(expected.isneginf().sum()) == 2
    assert detail.posinf_count == 0
    assert detail.numel == 6
    assert detail.first_index == (0, 1)
    assert detail.largest_finite == pytest.approx(math.log(4.0))
    assert detail.severity is Severity.NAN


@pytest.mark.parametrize(
    ("values", "severity"),
    [([1.0], Severity.FINITE), ([0.0], Severity.INF), ([0.0, -1.0], Severity.NAN)],
)
def test_a_detail_is_as_bad_as_its_range(values: list[float], severity: Severity) -> None:
    """Two ways to look at one tensor."""
    run = run_of(Logs(), torch.tensor(values))
    value = made_by(run, "log")
    detail = detail_of(run, value)
    assert detail is not None
    slot = run.plan.values[value].slot
    assert slot is not None
    assert detail.severity is Severity.of(float(run.statistics[slot, 1])) is severity


def test_a_run_that_is_closed_or_did_not_repeat_has_no_details() -> None:
    """Its inputs are gone, or a third run would be yet another computation."""
    run = run_of(Logs(), X)
    value = made_by(run, "log")
    assert detail_of(replace(run, not_again="it gave other numbers"), value) is None
    run.close()
    assert detail_of(run, value) is None
    assert numbers_inside(run) == {}


def test_other_numbers_on_the_way_are_no_details() -> None:
    """An input that was overwritten since gives another tensor: nothing is said of it."""
    x = X.clone()
    run = run_of(Shifted(), x)
    value = made_by(run, "log")
    assert detail_of(run, value) is not None
    x.mul_(3)
    assert detail_of(run, value) is None


def test_nothing_runs_again_where_all_is_finite() -> None:
    """Numbers inside operations are asked for only where something is bad."""
    run = run_of(Logs(), X.abs() + 1)

    def never(*args: object) -> None:
        raise AssertionError

    run.graph_module.forward = never
    assert numbers_inside(run) == {}
