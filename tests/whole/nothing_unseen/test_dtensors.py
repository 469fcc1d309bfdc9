"""DTensors are checked where they are, without any communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.odd_tensors import QUIET, SMALL
from support.ways import WAYS, assert_same_bits, prepared, the_way

pytestmark = QUIET


@pytest.fixture(params=["gloo", "fake"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One rank that computes; or the first of two, whose communication is counted, not done."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    if request.param == "gloo":
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    finally:
        distributed.destroy_process_group()


class Sharded(nn.Module):
    """A linear layer whose rows are spread over the ranks, and what only the whole of it knows."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import DTensor, Shard

        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        for name, parameter in list(self.linear.named_parameters()):
            # Not `distribute_tensor`: in torch 2.11 a fake process group scatters nothing.
            own = parameter.detach().chunk(mesh.size())[mesh.get_rank()]
            spread = DTensor.from_local(own, mesh, [Shard(0)])
            self.linear.register_parameter(name, nn.Parameter(spread))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.linear(x))
        return hidden.sum(dim=-1)


def replicated(x: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(x, mesh, [Replicate()])


def collectives(model: Callable[..., Any], x: Tensor) -> dict[str, int]:
    """How often each was called, in a forward that nothing has to be captured for."""
    from torch.distributed.tensor.debug import CommDebugMode

    model(x)
    with CommDebugMode() as communication:
        model(x)
    return {str(name): count for name, count in communication.get_comm_counts().items()}


@pytest.mark.parametrize("way", WAYS)
def test_checks_communicate_nothing(way: str, mesh: Any) -> None:
    """A healthy forward has the collectives of the plain model: each rank looks at its shard."""
    x = replicated(SMALL, mesh)
    with the_way(way):
        expected = collectives(prepared(Sharded(mesh), way), x)
        torch._dynamo.reset()
        model = fxguard.instrument(Sharded(mesh))
        assert collectives(prepared(model, way), x) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_dtensor_is_checked_where_it_is(way: str, mesh: Any) -> None:
    """The shard of this rank has the bits of the plain model, and a fault in it is blamed."""
    inputs = [replicated(x, mesh) for x in (SMALL, SMALL * 1e3)]
    with the_way(way):
        plain = prepared(Sharded(mesh), way)
        expected = [plain(x).to_local() for x in inputs]
        torch._dynamo.reset()
        reports: list[fxguard.types.Report] = []
        model = fxguard.instrument(Sharded(mesh), on_detect=reports.append)
        guarded = prepared(model, way)
        for x, shard in zip(inputs, expected, strict=True):
            assert_same_bits(guarded(x).to_local(), shard)
    assert [report.batch_number for report in reports] == [1]
    assert reports[0].origins[0].what == "exp"
    assert reports[0].rank == 0
