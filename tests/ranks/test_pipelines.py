"""Pipelines: shapes are inferred on uninitialised memory, and micro-batches are named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fxguard
from support.ranks_pipeline import CASES, FAULTY, MICRO_BATCHES, faulty, name_of
from support.torchrun import torchrun

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)

BATCH = MICRO_BATCHES + FAULTY  # of a stage, which counts its micro-batches
UNCHECKED = "; not checked: 1 call for shapes alone, on uninitialised memory"
APART = "sync_ranks=True has no effect in a pipeline, whose stages run at different times"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they found: one run of torchrun for all cases."""
    found = tmp_path_factory.mktemp("pipelines")
    ran = torchrun(Path(__file__).parents[1] / "support" / "ranks_pipeline.py", str(found))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return found


@pytest.fixture
def ranks(schedule: str, way: str, fault: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found in a case."""
    name = name_of(schedule, way, fault)
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "way", "fault"), CASES)
def test_two_ranks(schedule: str, way: str, fault: str, ranks: list[dict[str, Any]]) -> None:
    """Healthy stages say nothing; a fault is told with its rank, its stage and its micro-batch."""
    for found in ranks:
        assert found["same"]
        assert all(line.endswith(UNCHECKED) for line in found["coverage"])
        assert [each for each in found["warned"] if "sync_ranks" in each] == (
            [APART] if way == "together" else []
        )
        assert fault or not found["messages"]
        assert not found["notes"]  # the loss of another micro-batch is not absorbed
    if fault:
        kind, number, *_ = fault.split()
        stage, micro_batch = int(number), faulty(fault)
        told = ranks[stage % 2]
        operation = {"backward": "backward of sqrt made"}.get(kind, "exp made inf")
        batch = f"batch {MICRO_BATCHES + micro_batch}"
        where = f"rank {stage % 2}: {batch}, stage {stage}, micro-batch {micro_batch}: "
        first = next(each for each in told["messages"] if operation in each)
        assert first.startswith(f"{where}{operation}")
        assert [stage % 2, stage, micro_batch] in told["places"]
        places = [each for found in ranks for each in found["places"]]
        assert {number for *_, number in places} == {micro_batch}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x) * 0 + x)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group with this process alone."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(model: nn.Module, x: Tensor) -> None:
    """One step of a pipeline with a single stage."""
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda y, t: (y - t).sum())
    schedule.step(x, target=torch.zeros_like(x), losses=[])


@pytest.mark.parametrize("way", ["instrument", "watch"])
def test_a_micro_batch_is_named(way: str, one_rank: None) -> None:
    """In the message, in the record and in the text; a model outside of a pipeline has none."""
    reports: list[fxguard.types.Report] = []
    model = Net()
    watching: Any = contextlib.nullcontext()
    if way == "instrument":
        fxguard.instrument(model, on_detect=reports.append)
    else:
        watching = fxguard.watch(model, on_detect=reports.append)
    x = torch.ones(8, 4)
    x[2 * FAULTY] = 100.0
    with watching:
        step(model, torch.ones(8, 4))
        assert not reports
        step(model, x)
        message = f"rank 0: batch {BATCH}, stage 0, micro-batch {FAULTY}: exp made inf"
        assert reports[0].message.startswith(message)
        assert (reports[0].stage, reports[0].micro_batch) == (0, FAULTY)
        assert f"stage=0 micro_batch={FAULTY} rank=0" in str(reports[0])
        assert "2 calls for shapes alone" in fxguard.guard_of(model).coverage()
        reports.clear()
        model(x)
    assert reports[0].message.startswith(f"rank 0: batch {2 * MICRO_BATCHES}: exp made inf")
    assert reports[0].micro_batch is None
