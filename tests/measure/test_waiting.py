"""Values that wait are measured as they were made, whatever happens to them later."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxguard.measure import gpu_table, native, waiting, ways
from fxguard.passes.checks import with_checks
from fxguard.plan.reader import make_plan
from support.pretended_gpu import pretended
from support.written_later import CASES, X
from support.zoo import ZOO


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclasses.dataclass
class Measured:
    """What came of a graph in each of two ways."""

    graph: GraphModule
    one_by_one: Tensor
    together: Tensor
    launches: list[int]  # of the second way: how many tensors each read
    in_all: int  # values


def both_ways(function: Callable[..., Any], *inputs: Any, **named: Any) -> list[Measured]:
    """Each graph of a function, measured in both ways on copies of the same inputs."""
    found: list[Measured] = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        plan = make_plan(graph)

        def measured(*args: Any) -> Any:
            rows, counts = [], []
            for together in (False, True):
                with pretended(together=together) as launches:
                    checked = with_checks(graph, plan, ways.WAYS["eager"])
                    *_, statistics = checked(*copy.deepcopy([bare(each) for each in args]))
                    rows.append(statistics)
                    counts.append(list(launches.tensors))
            found.append(Measured(graph, *rows, counts[1], len(plan.checks)))
            return graph(*args)

        return measured

    torch.compile(function, backend=backend)(*inputs, **named)
    for each in found:
        assert each.one_by_one.numel()
        assert same(each.one_by_one, each.together), each.graph.code
    return found


def bare(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def same(one: Tensor, other: Tensor) -> bool:
    """In every bit, NaN included."""
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_measured_before_it_is_written(name: str) -> None:
    """Nothing but the numbers of each value at its own time, with fewer launches."""
    function, inputs = CASES[name]
    graphs = both_ways(function, *inputs)
    assert graphs
    for found in graphs:
        assert len(found.launches) <= found.in_all


@pytest.mark.parametrize("name", ["cnn", "lstm", "encoder", "twice", "in_place", "containers"])
def test_models_have_the_same_numbers(name: str) -> None:
    args, named = ZOO[name].inputs(torch.float32, False)
    for found in both_ways(ZOO[name].model(train=True), *args, **named):
        # In a chain of writes nothing can wait.
        assert len(found.launches) <= found.in_all // (1 if name == "in_place" else 2) + 1


def guarded(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """The graph of a function with checks that wait; inside :func:`pretended`."""
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, _: Any) -> GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(function, backend=backend)(X, *inputs)
    return with_checks(graphs[0], make_plan(graphs[0]), ways.WAYS["eager"], joined=False)


def chain(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin() + 1
    return x


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors of 48 bytes are as much as may wait."""
    monkeypatch.setattr(waiting, "_most_bytes", lambda device: 3 * X.nbytes)
    with pretended() as launches:
        checked = guarded(chain)
        launches.clear()
        checked(X)
    assert max(launches.tensors) == 4  # the one that is too much is measured with the others
    assert sum(launches.tensors) == 21


def test_what_waits_is_bounded_in_number() -> None:
    """By the places of a table."""

    def long(x: Tensor) -> Tensor:
        for _ in range(gpu_table.PLACES):
            x = x.sin() + 1
        return x

    with pretended() as launches:
        checked = guarded(long)
        launches.clear()
        checked(X)
    assert launches.tensors == [gpu_table.PLACES, gpu_table.PLACES, 1]


def test_nothing_waits_after_the_graph() -> None:
    """Neither after its end nor after an exception is a tensor kept."""
    made: list[weakref.ref[Any]] = []

    def later(what: waiting.Waiting, value: Any) -> Any:
        made.append(weakref.ref(value))
        return waiting.later(what, value)

    def picked(x: Tensor, index: Tensor) -> Tensor:
        return (x.sin() + 1)[index].cos()

    with pretended(), pytest.MonkeyPatch.context() as patch:
        way = ways.WAYS["eager"]
        assert way.together is not None
        together = dataclasses.replace(way.together, later=later)
        patch.setitem(ways.WAYS, "eager", dataclasses.replace(way, together=together))
        checked, may_fail = guarded(chain), guarded(picked, torch.tensor([0]))
        made.clear()
        rows = checked(X)[-1]
        gc.collect()
        assert len(rows) == len(made) == 21
        assert sum(ref() is not None for ref in made) == 1  # the input
        made.clear()
        with pytest.raises(IndexError):
            may_fail(X, torch.tensor([99]))
        gc.collect()
        assert len(made) == 4
        assert sum(ref() is not None for ref in made) == 1


def test_on_a_cpu_nothing_waits() -> None:
    """A graph of tensors on a CPU is the one that it was, and reads in C."""
    checked = guarded(chain)
    called = {node.target for node in checked.graph.nodes if node.op == "call_function"}
    assert ways.EAGER.in_memory in called
    assert not called & {waiting.Waiting, waiting.later, waiting.measure}
    if native.is_built:
        assert all(type(low) is float for low, _ in checked(X)[-1])


def test_observed_values_are_measured_at_once() -> None:
    """A dispatch mode has to see the operations as they come."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {}))

    with pretended() as launches:
        checked = guarded(chain)
        launches.clear()
        with Sees():
            *_, rows = checked(X)
    assert launches.tensors == []
    assert len(rows) == 21


def test_what_a_kernel_cannot_read_is_measured_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that fails hides no number."""

    def refuses(elements: Any) -> Any:
        raise RuntimeError("planted")

    with pretended():
        checked = guarded(chain)
        wanted = ways.WAYS["eager"].collect(checked(X)[-1])
        monkeypatch.setattr(gpu_table, "read", refuses)
        assert same(ways.WAYS["eager"].collect(checked(X)[-1]), wanted)
