"""Values that are measured together on the device: the numbers are those of one-by-one reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import fxguard
from fxguard.measure.ways import EAGER
from fxguard.passes.checks import with_checks
from fxguard.plan.reader import make_plan
from support.written_later import CASES


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def statistics_of(function: Callable[..., Any], *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The numbers of each graph, together and one by one."""
    found: list[tuple[Tensor, Tensor]] = []
    ways = EAGER, dataclasses.replace(EAGER, together=None)

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        plan = make_plan(graph)

        def measured(*args: Any) -> Any:
            rows = []
            for way in ways:
                given = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
                *_, statistics = with_checks(graph, plan, way)(*given)
                rows.append(statistics.cpu())
            found.append((rows[0], rows[1]))
            return graph(*args)

        return measured

    torch.compile(function, backend=backend)(*inputs)
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "overlapping inputs"])
def test_the_numbers_are_those_of_one_by_one(name: str, device: torch.device) -> None:
    """Copies of the inputs are given, so overlapping ones are left to the CPU."""
    function, inputs = CASES[name]
    pairs = statistics_of(function, *(each.to(device) for each in inputs))
    assert pairs
    for together, one_by_one in pairs:
        # Where there is a NaN, the smallest magnitude may be that of the others.
        whole = ~one_by_one[:, 1].isnan()
        assert torch.equal(together[whole], one_by_one[whole])
        assert bool(together[~whole, 1].isnan().all())


class Large(torch.nn.Module):
    """Many values of a size that fills what may wait."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = (x + 1).tanh()
        return x


def test_what_waits_is_bounded_on_the_device(device: torch.device) -> None:
    """A forward without gradients keeps at most a share of the memory beyond its own."""
    if device.type != "cuda":
        pytest.skip("memory is counted on a GPU")
    x = torch.zeros(2**22, device=device)
    model = fxguard.instrument(Large())
    with torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x)
    more = torch.cuda.max_memory_allocated() - before
    assert more <= torch.cuda.get_device_properties(device).total_memory // 256 + 8 * x.nbytes


def test_a_side_stream_is_measured_where_it_runs(device: torch.device) -> None:
    """A forward on another stream, after work that takes long there."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    found: list[Any] = []
    model = fxguard.instrument(Large().to(device), on_detect=found.append)
    x = torch.full((1000,), torch.nan, device=device)
    with torch.no_grad(), torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(20_000_000)
        y = torch.where(x.isnan(), x.new_ones(()), x)
        model(y)
        assert not found
        model(x)
    assert found


def test_gradients_that_wait_are_those_of_the_device(device: torch.device) -> None:
    """In every bit, accumulated twice, and a bad one is found."""

    def gradients(*, guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40))).to(device)
        if guarded:
            fxguard.instrument(model)
        for _ in range(2):
            model(torch.ones(2, 8, device=device)).square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    assert all(map(torch.equal, gradients(guarded=False), gradients(guarded=True)))
    found: list[Any] = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    fxguard.instrument(model, on_detect=found.append)
    (model(torch.ones(2, 8, device=device)) * 0).square().sum().sqrt().backward()
    assert found
