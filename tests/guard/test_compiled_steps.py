"""Optimizers whose step somebody compiles: what it spoils is said, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

pytestmark = pytest.mark.slow

Step = Callable[[], object]
# How a script gets its step: of a model, and the optimizer.
Way = Callable[[nn.Module, torch.optim.Optimizer], Step]


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4)


def the_method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    step = torch.compile(optimizer.step, backend="aot_eager")

    def whole() -> None:
        model(inputs()).square().sum().backward()
        step()
        optimizer.zero_grad()

    return whole


def a_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    def whole() -> None:
        model(inputs()).square().sum().backward()
        step()
        optimizer.zero_grad()

    return whole


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="aot_eager")
    def whole() -> None:
        model(inputs()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return whole


@pytest.fixture(params=[the_method, a_function, everything])
def way(request: pytest.FixtureRequest) -> Way:
    torch._dynamo.reset()
    chosen: Way = request.param
    return chosen


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def test_weights_that_it_made_bad(way: Way) -> None:
    """In the step that did it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        step = way(model, optimizer)
        step()
        step()
        moment = optimizer.state[model[2].weight]["exp_avg"]  # type: ignore[index]
        moment.fill_(torch.inf)
        step()
    assert [report.message for report in found] == ["batch 2: Adam's step made weight 2.weight NaN"]


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.Adam(weights, lr=torch.tensor(1e-2)),
        lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9),
        torch.optim.AdamW,
    ],
)
def test_healthy_steps(way: Way, make: Callable[..., torch.optim.Optimizer]) -> None:
    """The bits of weights and states; and not one graph more of the optimizer is compiled."""

    def trained(model: nn.Module) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        optimizer = make(model.parameters())
        step = way(model, optimizer)
        before = counters["stats"]["unique_graphs"]
        for _ in range(4):
            step()
        states = [x for state in optimizer.state.values() for x in state.values()]
        tensors = [x.detach() for x in (*model.parameters(), *states) if isinstance(x, Tensor)]
        return tensors, counters["stats"]["unique_graphs"] - before

    plain = net()
    watched = copy.deepcopy(plain)
    expected, graphs = trained(plain)
    with fxguard.watch(watched) as guard:
        found, graphs_watched = trained(watched)
    assert guard.last_report is None
    assert all(map(torch.equal, expected, found))
    if way is not everything:  # a guarded model and its loss are graphs of their own
        assert graphs_watched <= graphs + 1  # that of the model


def test_the_graph_of_an_optimizer_is_no_model(way: Way) -> None:
    """Where a script is run: AOTAutograd calls the graph that it has made as a module."""
    model = net()
    with OutermostModules(Options(), follow_losses=True) as outermost:
        step = way(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            step()
    assert [type(guard.model) for guard in outermost.guards] == [nn.Sequential]
    assert outermost.guards[0].batch_number == 3


def test_a_graph_of_a_user_is_a_model() -> None:
    """Whoever has made it by hand, and calls it."""
    traced = torch.fx.symbolic_trace(net())
    with OutermostModules(Options()) as outermost:
        traced(inputs())
    assert [guard.model for guard in outermost.guards] == [traced]


def test_a_step_that_may_not_break_goes_unseen() -> None:
    """It is one graph; its weights are named in the next forward."""
    torch._dynamo.reset()
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon(matrices, lr=torch.inf)
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
        model(inputs()).square().sum().backward()
        step()
        model(inputs())
    assert [report.message for report in found] == [
        "batch 1: 2 of 4 weights turned NaN between batch 0 and batch 1: 0.weight, 2.weight"
    ]
