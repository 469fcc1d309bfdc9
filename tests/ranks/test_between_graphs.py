"""Collectives between graphs: what they have written is measured, though no version tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxguard

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group with this process alone, where gathering copies a tensor into another."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.compiler.disable
def gather(into: Tensor, x: Tensor, *, waits: bool) -> None:
    if waits:
        dist.all_gather_into_tensor(into, x)
        return
    work = dist.all_gather_into_tensor(into, x, async_op=True)
    work.wait()


class Net(nn.Module):
    """Its second graph reads what other ranks have sent into a result of the first."""

    def __init__(self, waits: bool, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.waits, self.scale = waits, scale

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        gather(h, x * 50, waits=self.waits)
        return torch.exp(h * self.scale * self.weight)


@pytest.mark.parametrize("waits", [True, False])
def test_what_was_received_is_what_grew(waits: bool) -> None:
    """The product grew from 50, not from the sine that stood there before; nor in float64."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(waits, 2.0), on_detect=found.append)
    model(torch.ones(3))
    [report] = found
    assert report.origins[0].message.startswith("exp made inf")
    climb = report.origins[0].climb
    assert (climb[-1].title, climb[-1].before, climb[-1].after) == ("mul", 50.0, 100.0)
    assert not any("view" in each.title for each in climb)
    assert "exp(100.0) is 2.68812e+43 in float64" in str(report)
    fxguard.remove(model)
    healthy = fxguard.instrument(Net(waits, 1.0))  # the clean twin
    assert healthy(torch.ones(3)).equal(torch.exp(torch.full((3,), 50.0)))


class Overflows(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        gather(h, x / 0, waits=True)
        return h * self.weight


def test_a_collective_is_an_operation() -> None:
    """It has a frame, as what brings the numbers of other ranks."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Overflows(True, 1.0), on_detect=found.append)
    model(torch.ones(3))
    titles = [frame.title for frame in fxguard.guard_of(model).frames()]
    assert any("all_gather" in title for title in titles)
