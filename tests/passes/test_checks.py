"""What a graph with checks is: one statistic for each check, and inputs that stay in front."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxguard.measure import eager
from fxguard.measure.ways import EAGER, TRACEABLE, WAYS
from fxguard.passes.checks import PROVENANCE, insert_checks, with_checks
from fxguard.passes.unmark import without_marks
from fxguard.plan.reader import make_plan

FUNCTIONAL = torch.ops._c10d_functional


class Tuple(nn.Module):
    """Returns a tuple, as what TorchDynamo hands to a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(x).exp()
        return made, made * y


X, Y = torch.ones(2, 4), torch.full((2, 4), 3.0)


@pytest.mark.parametrize("way", {"traceable": TRACEABLE, **WAYS}.values(), ids=lambda way: way.name)
def test_statistics_are_one_more_item(way: Any) -> None:
    """One row for each check, whichever way measures; the results are those of the model."""
    model = Tuple()
    graph = symbolic_trace(model)
    plan = make_plan(graph)
    *results, statistics = with_checks(graph, plan, way)(X, Y)
    assert all(map(torch.equal, results, model(X, Y)))
    assert statistics.shape == (len(plan.checks), 2)
    _, wanted = insert_checks(graph)[0](X, Y)
    assert torch.equal(statistics, wanted)


def test_what_was_measured_may_leave_a_graph_as_it_is() -> None:
    """Whoever runs the graph joins it then, to the same numbers."""
    model = Tuple()
    graph = symbolic_trace(model)
    plan = make_plan(graph)
    *_, wanted = with_checks(graph, plan, EAGER)(X, Y)
    *results, measured = with_checks(graph, plan, EAGER, joined=False)(X, Y)
    assert all(map(torch.equal, results, model(X, Y)))
    assert isinstance(measured, list)
    assert torch.equal(eager.as_tensor(eager.gathered(measured)), wanted)


def test_each_statistic_knows_its_check() -> None:
    """The nodes that measure carry the plan's checks, in their order."""
    graph = symbolic_trace(Tuple())
    plan = make_plan(graph)
    made = [node.meta.get(PROVENANCE) for node in with_checks(graph, plan, TRACEABLE).graph.nodes]
    assert set(filter(None, made)) == set(plan.checks)
    assert not any(PROVENANCE in node.meta for node in graph.graph.nodes)


def test_nothing_stands_between_inputs() -> None:
    graph = symbolic_trace(Tuple())
    checked = with_checks(graph, make_plan(graph), TRACEABLE)
    is_input = [node.op == "placeholder" for node in checked.graph.nodes]
    assert is_input[:2] == [True, True]
    assert not any(is_input[2:])


def test_a_graph_without_a_tuple_has_no_place_for_statistics() -> None:
    """insert_checks makes a pair of what such a graph returns."""

    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    graph: GraphModule = symbolic_trace(Single())
    with pytest.raises(AssertionError, match="a place among the results"):
        with_checks(graph, make_plan(graph), TRACEABLE)
    output, statistics = insert_checks(graph)[0](X)
    assert torch.equal(output, X.exp())
    assert len(statistics) == 2


def test_a_graph_without_marks_computes_the_same() -> None:
    graph = symbolic_trace(Tuple())
    bare = without_marks(graph)
    assert bare is not graph
    assert all(map(torch.equal, bare(X, Y), graph(X, Y)))


@pytest.mark.parametrize("way", {"traceable": TRACEABLE, **WAYS}.values(), ids=lambda way: way.name)
def test_what_a_collective_brings_is_measured_behind_its_wait(way: Any) -> None:
    """Until then, other ranks may not have written it: the number would be another time's."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(4)
    made = graph.call_function(FUNCTIONAL.all_reduce, (x, "sum", "0"))
    waited = graph.call_function(FUNCTIONAL.wait_tensor, (made,))
    doubled = graph.call_function(torch.mul, (waited, 2))
    for node in (made, waited, doubled):
        node.meta["example_value"] = torch.ones(4)
    graph.output((doubled,))
    module = GraphModule(nn.Module(), graph)
    plan = make_plan(module)
    (check,) = [each for each in plan.checks if each.after == made.name]
    order = list(with_checks(module, plan, way).graph.nodes)
    measured = next(node for node in order if node.meta.get(PROVENANCE) == check)
    wait = next(node for node in order if node.target is FUNCTIONAL.wait_tensor)
    assert measured > wait
