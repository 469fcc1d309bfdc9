"""A graph to its Plan: what holds of every plan, and which node each step comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn.attention.flex_attention import flex_attention

from fxguard.graph import nodes
from fxguard.plan.plan import Plan
from fxguard.plan.reader import make_plan
from fxguard.records import Role
from support.models import Checkpointed


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(model: Any, *args: Any) -> GraphModule:
    """The graph that TorchDynamo makes of a call."""
    graphs: list[GraphModule] = []

    def keep(graph_module: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    torch.compile(model, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.exp(), lambda x: x.sin() + 1, (x,))


def loop(x: Tensor) -> Any:
    return torch.while_loop(lambda x: x.sum() < 9, lambda x: (x * 2 + 1,), (x,))


def scores(x: Tensor) -> Any:
    q = x.view(1, 1, 3, 4)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)


def in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y[0] = 1
    y.add_(1)
    return y.view(-1)


def batched(x: Tensor) -> Any:
    return torch.vmap(lambda row: (row / row.sum()).exp())(x)


class Normed(nn.Module):
    """Its running statistics are written, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x) + self.norm.running_mean


X = torch.linspace(0.5, 1, 12).view(3, 4)
SUBJECTS: dict[str, Any] = {
    "checkpoint": Checkpointed,
    "branches": lambda: branches,
    "loop": lambda: loop,
    "scores": lambda: scores,
    "in place": lambda: in_place,
    "batched": lambda: batched,
    "running statistics": Normed,
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_holds_of_every_plan(name: str) -> None:
    """The statements in the docstring of Plan."""
    plan = make_plan(captured(SUBJECTS[name](), X.clone()))
    assert plan.steps
    known = {index for index, value in enumerate(plan.values) if value.role is not Role.MADE}
    for step in plan.steps:
        assert known.issuperset(step.inputs)
        assert known.isdisjoint(step.outputs)
        assert len(set(step.outputs)) == len(step.outputs)
        known.update(step.outputs)
    slots = [value.slot for value in plan.values if value.slot is not None]
    assert sorted(slots) == list(range(len(plan.checks)))
    later = [value.later for value in plan.values if value.later is not None]
    assert sorted(later) == list(range(len(plan.later)))
    around = [check.inside[0][0] if check.inside else "" for check in plan.checks]
    entered = [operation for operation, _ in itertools.groupby(around) if operation]
    assert len(entered) == len(set(entered))


def node_of(graph_module: GraphModule, inside: tuple[tuple[str, int], ...], name: str) -> Any:
    """The node of a name, in the body that operations and positions lead to."""
    for operation, position in inside:
        around = {node.name: node for node in graph_module.graph.nodes}
        argument: Any = around[operation].args[position]
        graph_module = nodes.attribute_of(graph_module, argument.target)
    return {node.name: node for node in graph_module.graph.nodes}[name]


@pytest.mark.parametrize("name", SUBJECTS)
def test_steps_know_their_node(name: str) -> None:
    """Each step names the node that made it, also in bodies; a link names none."""
    graph_module = captured(SUBJECTS[name](), X.clone())
    plan = make_plan(graph_module)
    for step in plan.steps:
        if not step.node:
            assert not step.counts
            continue
        assert step.kind in str(node_of(graph_module, step.inside, step.node).target)
    assert any(step.inside for step in plan.steps) == (
        name in ("checkpoint", "branches", "loop", "scores")
    )


def test_title_is_module_and_kind() -> None:
    plan = make_plan(symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    assert [step.title for step in plan.steps] == ["0 Linear", "1 ReLU"]


def test_weights_and_buffers_are_told_from_inputs() -> None:
    """By the names that TorchDynamo gives to a graph's inputs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    plan = make_plan(captured(model, torch.randn(2, 4)))
    roles = {value.name: value.role for value in plan.values if value.role is not Role.MADE}
    assert roles == {
        **{name: Role.WEIGHT for name, _ in model.named_parameters()},
        **dict.fromkeys(("1.running_mean", "1.running_var"), Role.BUFFER),
        "input[0]": Role.INPUT,
    }


def overwritten(model: Any, *args: Any) -> Plan:
    return make_plan(captured(model, *args))


def test_overwritten_inputs_are_part_of_the_plan() -> None:
    """What is read and then written has to be copied; what is written at once is the same again."""

    def adds(x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x)

    def fills(x: Tensor, y: Tensor) -> Tensor:
        return y.copy_(x) * 2

    def normalizes(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    def names_of(plan: Plan) -> list[str]:
        names = {position: plan.values[value].name for position, value in plan.inputs}
        return [names[position] for position in plan.overwritten]

    assert names_of(overwritten(adds, X.clone(), X.clone())) == ["y"]
    numbers = X.mean(0), X.var(0)
    assert names_of(overwritten(normalizes, X.clone(), *numbers)) == ["mean", "var"]
    assert overwritten(fills, X.clone(), X.clone()).overwritten == ()
    assert overwritten(in_place, X.clone()).overwritten == ()
