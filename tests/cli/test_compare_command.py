"""``fxguard run --record`` and ``fxguard compare``."""

from __future__ import annotations

import json
from pathlib import Path

from support.needs import needs
from support.programs import run_python
from support.schema import told
from support.torchrun import torchrun

needs("safetensors")

TRAINS = """\
import torch
from torch import nn
from torch.nn import functional

EPS = 1e-5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.up(x) * 1e-2
        return self.head(functional.layer_norm(h, (8,), eps=EPS))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = (model(torch.ones(2, 4) * torch.tensor([[1.0], [2.0]])) - 1).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step)
"""


def test_two_versions_of_a_script(tmp_path: Path) -> None:
    """Each is recorded up to the loss of its first step, and ends there."""
    (tmp_path / "a.py").write_text(TRAINS)
    (tmp_path / "b.py").write_text(TRAINS.replace("EPS = 1e-5", "EPS = 1e-4"))
    for name in ("a", "b"):
        done = run_python(
            tmp_path, "-m", "fxguard", "run", "--record", name, "--json", "run.json", f"{name}.py"
        )
        assert done.returncode == 0, done.stderr
        assert f"operations recorded in {name}, up to the loss" in done.stdout
        assert "step 0" not in done.stdout
        assert told("", json.loads((tmp_path / "run.json").read_text())) == []
    done = run_python(
        tmp_path, "-m", "fxguard", "compare", "a", "b", "--html", "page.html", "--json", "c.json"
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("A: a: Net, float32")
    assert "1e-05 in A, 0.0001 in B" in done.stdout
    assert "a.py:15" in done.stdout
    assert "b.py:15" in done.stdout
    record = json.loads((tmp_path / "c.json").read_text())
    assert told("RunComparison", record) == []
    assert record["outputs"][0]["b"] == "of"
    assert "Where they part" in (tmp_path / "page.html").read_text()
    again = run_python(tmp_path, "-m", "fxguard", "run", "--record", "a", "a.py")
    assert again.returncode == 2
    assert "a record is not overwritten" in again.stderr


def test_batches_that_are_asked_for(tmp_path: Path) -> None:
    """The script goes on as before up to the last of them, with its own random numbers."""
    script = TRAINS.replace('print("step", step)', 'print("step", step, torch.rand(1).item())')
    (tmp_path / "train.py").write_text(script)
    alone = run_python(tmp_path, "train.py").stdout.splitlines()
    run = ("-m", "fxguard", "run", "--record", "there", "--record-batches", "0,2", "train.py")
    done = run_python(tmp_path, *run)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert lines == alone[:2]
    assert {each.name for each in (tmp_path / "there").iterdir()} == {"batch-0", "batch-2"}
    compared = run_python(tmp_path, "-m", "fxguard", "compare", "there/batch-0", "there/batch-2")
    assert compared.returncode == 1
    assert "of B is not head." in compared.stdout  # the optimizer has moved it


def test_one_batch_later_and_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    run = ("-m", "fxguard", "run", "--record", "there", "--record-batches")
    done = run_python(tmp_path, *run, "1", "train.py")
    assert done.returncode == 0, done.stderr
    assert "step 0" in done.stdout
    assert "step 1" not in done.stdout
    assert (tmp_path / "there" / "record.json").exists()
    late = run_python(tmp_path, *run[:-2], "late", run[-1], "7", "train.py")
    assert late.returncode == 0
    assert "step 2" in late.stdout
    assert "the script ended after 3 steps: there is nothing more to record" in late.stderr
    assert not (tmp_path / "late").exists()


def test_wrong_batches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    for options, said in (
        (("--record", "there", "--record-batches", "x"), "takes numbers such as 0 or 0,10"),
        (("--record-batches", "0"), "--record-batches needs --record FOLDER"),
    ):
        done = run_python(tmp_path, "-m", "fxguard", "run", *options, "train.py")
        assert done.returncode == 2
        assert said in done.stderr


RANKS = """\
import os
import sys

import torch
import torch.distributed as dist
from torch import nn


class Mlp(nn.Module):
    def __init__(self, rank, ranks):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(8, 16), nn.Linear(16, 1, bias=False)
        mine = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
        self.ranks = ranks
        self.up = nn.Parameter(up.weight[mine].detach().clone())
        self.down = nn.Parameter(down.weight[:, mine].detach().clone())

    def forward(self, x):
        y = (x @ self.up.T).relu() @ self.down.T
        if self.ranks > 1 and "missing" not in sys.argv:
            with torch.no_grad():
                dist.all_reduce(y)
        return y


ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("gloo")
model = Mlp(int(os.environ.get("RANK", 0)), ranks)
x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
model(x).square().mean().backward()
"""


def test_ranks_of_a_script(tmp_path: Path) -> None:
    """Each rank writes its own folder, and all of them are compared with one process."""
    script = tmp_path / "mlp.py"
    script.write_text(RANKS)
    done = run_python(tmp_path, "-m", "fxguard", "run", "--record", "one", "mlp.py")
    assert done.returncode == 0, done.stderr
    for name, more in (("right", []), ("wrong", ["missing"])):
        command = ["fxguard", "run", "--record", name, "mlp.py", *more]
        started = torchrun(Path("-m"), *command, at=tmp_path)
        assert started.returncode == 0, started.stderr
        assert sorted(x.name for x in (tmp_path / name).iterdir()) == ["rank-0", "rank-1"]
    found = run_python(tmp_path, "-m", "fxguard", "compare", "one", "right")
    assert found.returncode == 0, found.stdout
    found = run_python(tmp_path, "-m", "fxguard", "compare", "one", "wrong")
    assert found.returncode == 1
    assert "tried: B with the sum over ranks of mm (mlp.py:20)" in found.stdout, found.stdout
