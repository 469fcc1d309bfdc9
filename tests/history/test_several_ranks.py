"""Histories of a model that ranks share: each keeps its own, and one tells each event."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxguard
from fxguard.history._of_ranks import seen_by_ranks
from fxguard.report.event import Event
from support.needs import needs
from support.torchrun import torchrun

needs("pyarrow")

COUNT = 2

without_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left histories and what they found: one run of torchrun for all."""
    found = tmp_path_factory.mktemp("ranks")
    ran = torchrun(Path(__file__).parents[1] / "support" / "ranks_history.py", str(found))
    assert not ran.returncode, ran.stderr[-3000:]
    return found


@pytest.fixture
def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(COUNT)]


@without_gloo
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_bad_shard_of_data_on_one_rank(
    how: str, folder: Path, found: list[dict[str, Any]]
) -> None:
    """It is named with its rank, and once: in the gradients of the other rank it showed, too."""
    headline = "step 80 on rank 1: the data changed: input x"
    said = [rank[f"{how}-shard"]["said"] for rank in found]
    assert said[0] == []
    assert said[1][0] == f"fxguard: {headline}"
    history = fxguard.load_history(folder / f"{how}-shard")
    assert history.ranks == (0, 1)
    (event,) = history.events
    assert (event.headline, event.ranks) == (headline, (1,))
    lines = history.lines()
    assert lines[0] == headline
    assert lines[-1] == "2 ranks"
    (largest,) = (line for line in lines if "input x largest" in line)
    assert float(largest.split()[4]) > 100 * float(largest.split()[3]) / 2  # of rank 1
    for rank in range(COUNT):
        name = next(name for name in history.series if name.startswith("loss "))
        track = history.get(name, rank)
        assert list(track.steps) == list(range(90))
        assert track.high == pytest.approx(found[rank][f"{how}-shard"]["losses"], rel=1e-6)


@without_gloo
def test_what_all_ranks_see_is_told_once(folder: Path, found: list[dict[str, Any]]) -> None:
    said = [line for rank in found for line in rank["ddp-rate"]["said"]]
    assert [line for line in said if "step 80" in line[:17]] == [
        "fxguard: step 80: learning rate of AdamW's step changed; the loss moved 1 step later"
    ]
    (event,) = fxguard.load_history(folder / "ddp-rate").events
    assert event.ranks == ()


@without_gloo
def test_of_a_sharded_weight_each_rank_measures_its_shard(folder: Path) -> None:
    whole = fxguard.load_history(folder / "ddp-shard")
    shards = fxguard.load_history(folder / "fsdp-shard")
    for name in ("weight blocks.0.up.weight", "gradient head.weight", "weight head.bias"):
        expected = whole.get(name).high[0]
        each = [shards.get(name, rank).high[0] for rank in range(COUNT)]
        assert sum(x * x for x in each) == pytest.approx(expected**2, rel=1e-3)
        assert max(each) < expected
    assert max(shards.get("gradient head.weight turned").high) == 0
    assert "state exp_avg_sq of AdamW's step" in shards.series


@without_gloo
def test_nothing_waits_for_another_rank(folder: Path, found: list[dict[str, Any]]) -> None:
    """One rank alone keeps a history of sharded weights, and nothing changes by it."""
    assert fxguard.load_history(folder / "fsdp-one").ranks == (1,)
    for rank in found:
        assert rank["fsdp-shard"]["losses"] == rank["fsdp-one"]["losses"]
        assert rank["fsdp-none"]["losses"] == rank["fsdp-one"]["losses"]


SCRIPT = """
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(distributed.get_rank())
for step in range(20):
    x = torch.randn(32, 8)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
distributed.destroy_process_group()
"""


@without_gloo
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    """Modules inside the model, which never run alone, have no history."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "fxguard", "run", "--history", "kept", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = [line for line in ran.stderr.splitlines() if "fxguard" in line]
    assert said[0] == "fxguard: for the whole run: fxguard history kept", ran.stderr
    assert len(said) == 2
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    parquet = [f"run0-rank{rank}-000000000000-000000000019.parquet" for rank in range(COUNT)]
    assert names == ["meta-rank1.json", "meta.json", *parquet]


def event(cause: str, step: int = 80, what: str = "input x", lead: int = 0) -> Event:
    return Event(step, cause, what, lead=lead)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by_rank", "told"),
    [
        ({0: [event("data")], 1: [event("data")]}, ["data on ranks 0 and 1"]),
        ({0: [event("data")], 1: [event("data", 81)]}, ["data on rank 0", "data on rank 1"]),
        (
            {0: [event("data")], 1: [event("data", what="input y")]},
            ["data on rank 0", "data on rank 1"],
        ),
        ({0: [event("gradient")], 2: [event("data")]}, ["data on rank 2"]),
        ({0: [event("gradient", 81)], 2: [event("data")]}, ["data on rank 2"]),
        (
            {0: [event("gradient", 82)], 2: [event("data")]},
            ["data on rank 2", "gradient on rank 0"],
        ),
        (
            {0: [event("gradient", 79)], 2: [event("data")]},
            ["gradient on rank 0", "data on rank 2"],
        ),
        ({0: [event("operation")], 1: [event("data", what="x")]}, ["data on rank 1"]),
        (
            {0: [event("operation")], 1: [event("operation", what="x")]},
            ["operation on rank 0", "operation on rank 1"],
        ),
        ({0: [event("data"), event("unknown")]}, ["data on rank 0", "unknown on rank 0"]),
        ({0: [event("step")], 1: [event("gradient")]}, ["step on rank 0", "gradient on rank 1"]),
        (
            {rank: [event("gradient", what=f"w{rank}")] for rank in range(3)},
            ["gradient"],
        ),
        ({rank: [event("growth", 80 + 8 * rank)] for rank in range(3)}, ["growth"]),
        (
            {0: [event("growth")], 1: [event("growth", 180)]},
            ["growth on rank 0", "growth on rank 1"],
        ),
    ],
)
def test_events_of_three_ranks(by_rank: dict[int, list[Event]], told: list[str]) -> None:
    """What all saw names no rank; what follows from another rank's data is not told again."""
    seen = seen_by_ranks(by_rank, lambda step: range(3))
    found = [each.event.headline.partition(":")[0].partition(" on ") for each in seen]
    causes = [each.event.cause for each in seen]
    words = [f"{cause}{on}{who}" for cause, (_, on, who) in zip(causes, found, strict=True)]
    assert words == told
