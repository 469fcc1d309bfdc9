"""A second run begins as the first one did, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.batch.events import GraphRun
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.rerun.differences import same_magnitude
from fxguard.rerun.start import Start
from fxguard.testing import numerically_stable
from fxguard.testing.watch import as_module


class Net(nn.Module):
    """A product of an input and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def run_on(x: Tensor, model: nn.Module | None = None) -> GraphRun:
    graph = torch.fx.symbolic_trace(Net() if model is None else model)
    _, plan = fxguard.insert_checks(graph)
    state = RandomState.now((x,))
    return GraphRun(plan, graph, torch.zeros(len(plan.checks), 2), (x,), state, ("", ""), ())


def test_the_same_numbers_are_drawn_and_the_users_are_not_used_up() -> None:
    """What is drawn afterwards is what would have been drawn without it."""
    torch.manual_seed(3)
    run = run_on(torch.ones(3))
    first = torch.rand(4)
    expected = torch.get_rng_state()
    with Start(run).begun():
        assert torch.rand(4).tolist() == first.tolist()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.get_rng_state().tolist() == expected.tolist()


class Writes(Net):
    """Changes its input first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) * self.weight


def test_what_it_may_write_is_copied() -> None:
    """An input of the first run stays as it is; one that is only read needs no copy."""
    x = torch.ones(3, requires_grad=True)
    (copy,) = Start(run_on(x, Writes())).copies()
    assert copy.tolist() == x.tolist()
    assert copy.data_ptr() != x.data_ptr()
    assert not copy.requires_grad
    (same,) = Start(run_on(x)).copies()
    assert same is x


def kept_run(model: nn.Module, *args: Tensor) -> GraphRun:
    """The first run of a model's graph, as its guard heard of it."""
    runs: list[GraphRun] = []
    hear = Plugins(hear=lambda run, outputs: runs.append(replace(run)))
    GuardedModel(model, Options(on_detect=lambda report: None), hear).install()
    model(*args)
    return runs[0]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group with this process alone."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def summed(x: Tensor) -> Tensor:
    return all_reduce(x, "sum", dist.group.WORLD)


class Reduces(Net):
    def forward(self, x: Tensor) -> Tensor:
        return summed(x.sin()) * self.weight


class InBody(Net):
    """A collective in the body of a higher-order operation."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: summed(x.sin()), x, use_reentrant=False) * self.weight


class Checkpoints(Net):
    """The clean twin."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False) * self.weight


class OnlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class InBackward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return OnlyBackward.apply(x * self.weight)


class Local(Net):
    """Computes with a DTensor inside, and returns a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (1,))

    def forward(self, x: Tensor) -> Tensor:
        return (DTensor.from_local(x, self.mesh, [Shard(0)]) * 2).to_local() * self.weight


WAITS = [
    (Reduces, "all_reduce is a collective"),
    (InBody, "all_reduce is a collective"),
    (InBackward, "all_reduce is a collective"),
    (Local, "operations on a DTensor may be collectives"),
    (Checkpoints, ""),
    (Net, ""),
]


@pytest.mark.parametrize(("kind", "reason"), WAITS)
def test_no_second_run_waits_for_other_ranks(kind: Any, reason: str, one_rank: None) -> None:
    """Whatever a graph holds that may be a collective, the gate names it; a clean graph passes."""
    run = kept_run(kind(), torch.ones(3, requires_grad=True))
    said = Start(run).why_not()
    assert said.startswith(reason)
    assert bool(said) is bool(reason)
    if not reason:
        with Start(run).begun() as given:
            assert len(given) == 2
        return
    with pytest.raises(NotJudged, match=reason), Start(run).begun():
        raise AssertionError("it began")


def test_a_dtensor_is_an_argument_of_several_ranks(one_rank: None) -> None:
    x = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)])
    run = run_on(x)
    with pytest.raises(NotJudged, match="operations on a DTensor may be collectives"):
        Start(run, to_the_end=False).copies()


@torch.library.custom_op("start::summed", mutates_args=())
def hidden(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


@torch.library.custom_op("start::doubled", mutates_args=())
def harmless(x: Tensor) -> Tensor:
    return x.sin() * 2


for operation in (hidden, harmless):
    operation.register_fake(torch.empty_like)


def test_a_collective_in_a_custom_operation_is_stopped(one_rank: None) -> None:
    """The graph does not show it; another custom operation gives its numbers as ever."""
    x = torch.randn(3)
    run = kept_run(as_module(lambda x: harmless(x) + hidden(x)), x)
    with Start(run).begun() as given:
        assert harmless(*given).equal(harmless(x))
        with pytest.raises(NotJudged, match="allreduce_ is a collective"):
            hidden(*given)
    assert hidden(x).equal(x)


def test_a_second_run_has_the_inputs_of_the_first() -> None:
    """An input that is gone, freed or written since is no input; its own writes are copies."""
    x = torch.ones(3)
    run = kept_run(Writes(), x)
    assert Start(run).why_not() == ""
    x.add_(1)  # the run holds a copy
    assert Start(run).why_not() == ""
    run = kept_run(Net(), x)
    assert Start(run).why_not() == ""
    x.add_(1)
    assert Start(run).why_not() == "an input of its graph was written since"
    assert Start(replace(run, args=None)).why_not() == "an input of its graph is gone"
    x.untyped_storage().resize_(0)
    with pytest.raises(NotJudged, match="an input of its graph has been freed"):
        Start(run).copies()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1.01, True),
        (1.0, 1.1, False),
        (0.0, 1e-31, True),
        (0.0, 1e-3, False),
        (math.inf, math.inf, True),
        (math.inf, 3e38, False),
        (math.nan, math.nan, True),
        (math.nan, math.inf, False),
    ],
)
def test_magnitudes_of_one_computation(one: float, other: float, same: bool) -> None:
    """Compilers keep more digits; inf and NaN are only equal to themselves."""
    assert same_magnitude(one, other) is same
    assert same_magnitude(other, one) is same


@pytest.mark.parametrize("ask", [fxguard.forecast, numerically_stable], ids=lambda x: x.__name__)
def test_a_tool_says_why_it_cannot_run_a_graph_again(ask: Any, one_rank: None) -> None:
    """A DTensor among the weights: the error is one of fxguard's, in one line."""
    mesh = init_device_mesh("cpu", (1,))

    class Split(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))

        def forward(self, x: Tensor) -> Tensor:
            return (DTensor.from_local(x, mesh, [Shard(0)]) * self.weight).to_local()

    with pytest.raises(fxguard.FxguardError, match=r"^there is no .*DTensor"):
        ask(Split(), torch.ones(3))
