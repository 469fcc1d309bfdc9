"""Quiet faults at the end of ``fxguard run``: lines, record, exit status, several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fxguard.errors import FxguardError
from fxguard.report.load import load_report
from support.schema import told
from support.torchrun import torchrun

LOOP = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(30):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
"""

HEALTHY = LOOP.replace("    loss.back", "    optimizer.zero_grad()\n    loss.back")

IN_A_FUNCTION = """\
import torch


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model[1] = torch.nn.Linear(8, 1)
    for step in range(45):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()


main()
"""

SCALED = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(30):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    scaler.scale((model(x) - x.sum(1, keepdim=True)).pow(2).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

UNSCALED = SCALED.replace(
    "    torch.nn.utils", "    scaler.unscale_(optimizer)\n    torch.nn.utils"
)

SCALED_BOUND = SCALED.replace("(), 1.0)", "(), 1.0 * scaler.get_scale())")

RANKS = """\
import sys
import tempfile
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def work(rank, file, way):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    wrapped = DistributedDataParallel(model)
    called = model if way == "inner" else wrapped
    optimizer = torch.optim.SGD(model.parameters(), 1e-2 * (1 + rank * (way == "rates")))
    torch.manual_seed(rank)
    for step in range(90):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (called(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
        if way == "averaged" and step % 3 == 2:
            for weight in model.parameters():
                dist.all_reduce(weight.data)
                weight.data /= 2
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder + "/store", sys.argv[1]), nprocs=2)
"""


def run(folder: Path, script: str, *options: str, args: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit status of ``fxguard run``, and what it prints on stderr."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "fxguard", "run", *options, "train.py", *args]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stderr


def test_a_note_stands_above_the_last_line(tmp_path: Path) -> None:
    status, printed = run(tmp_path, LOOP, "--json", "run.json")
    assert status == 0
    note, last = printed.splitlines()
    assert note.startswith("fxguard: note: stale gradients: this backward adds to the gradient of")
    assert "(train.py:9): it was not set to 0 before step " in note
    assert note.endswith(
        "; call optimizer.zero_grad() once for each step, before its first backward"
    )
    assert last == "fxguard: checked 30 batches of Sequential (3 operations); nothing else found"
    record = json.loads((tmp_path / "run.json").read_text())
    assert told("Run", record) == []
    (fault,) = record["quiet_faults"]
    assert (fault["kind"], fault["source"]) == ("stale gradients", "train.py:9")
    assert record["verdict"] == [line.removeprefix("fxguard: ") for line in (note, last)]


@pytest.mark.parametrize(("script", "expected"), [(LOOP, 5), (HEALTHY, 0)])
def test_a_note_can_end_a_run_with_a_status(tmp_path: Path, script: str, expected: int) -> None:
    status, _ = run(tmp_path, script, "--fail-on", "note", "--json", "run.json")
    assert status == expected
    assert json.loads((tmp_path / "run.json").read_text())["status"] == expected


def test_the_own_status_of_a_script_comes_first(tmp_path: Path) -> None:
    status, printed = run(tmp_path, LOOP + "raise SystemExit(7)\n", "--fail-on", "note")
    assert status == 7
    assert "note: stale gradients" in printed


def test_a_model_that_is_gone_at_the_end_is_judged(tmp_path: Path) -> None:
    _, printed = run(tmp_path, IN_A_FUNCTION)
    assert (
        "note: never moves: model.1.weight and model.1.bias: no optimizer holds it" in printed
        or ("note: never moves: 1.weight and 1.bias: no optimizer holds it" in printed)
    )


@pytest.mark.parametrize(
    ("script", "is_told"), [(SCALED, True), (UNSCALED, False), (SCALED_BOUND, False)]
)
def test_clipping_before_the_scaler(tmp_path: Path, script: str, is_told: bool) -> None:
    _, printed = run(tmp_path, script)
    assert ("note: clipped before unscaled: " in printed) is is_told
    assert ("(train.py:11)" in printed) is is_told


@pytest.mark.parametrize(
    ("way", "told_of"),
    [
        ("right", ""),
        ("averaged", ""),
        ("inner", "call the DDP module itself"),
        ("rates", "the learning rates are 0.0"),
    ],
)
def test_replicas(tmp_path: Path, way: str, told_of: str) -> None:
    """Each rank leaves its numbers in the store of the process group, and none waits."""
    status, printed = run(tmp_path, RANKS, args=(way,))
    assert status == 0
    notes = [line for line in printed.splitlines() if "note: replicas differ: " in line]
    assert len(notes) == bool(told_of)
    assert all("ranks 0 and 1 hold different numbers in 4 weights" in line for line in notes)
    assert all(told_of in line for line in notes)


ENDS_BADLY = HEALTHY.replace("    optimizer.zero_grad()\n", "").replace(
    "    loss.backward()",
    "    loss = loss * (float('nan') if step == 20 else 1)\n    loss.backward()",
)


def test_a_detection_with_notes(tmp_path: Path) -> None:
    """A report tells what is wrong besides: in the text, in the JSON, on the page."""
    command = [sys.executable, "-m", "fxguard", "run", "--report", "report.json", "train.py"]
    (tmp_path / "train.py").write_text(ENDS_BADLY)
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 3, found.stderr
    assert "note: stale gradients: " in found.stderr
    record = json.loads((tmp_path / "report.json").read_text())
    assert told("Report", record) == []
    assert [fault["kind"] for fault in record["quiet_faults"]] == ["stale gradients"]
    assert record["verdict"][-1].startswith("note: stale gradients")
    report = load_report(tmp_path / "report.json")
    assert [fault.kind for fault in report.quiet_faults] == ["stale gradients"]
    report.to_html(tmp_path / "report.html")
    assert "note: stale gradients" in (tmp_path / "report.html").read_text()
    record["quiet_faults"][0]["kind"] = "made up"
    (tmp_path / "report.json").write_text(json.dumps(record))
    with pytest.raises(FxguardError, match="made up"):
        load_report(tmp_path / "report.json")


SHARDED = """\
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
for part in (model[0], model):
    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(30):
    x = torch.randn(16, 8)
    y = x.sum(1) if sys.argv[1] == "broadcast" else x.sum(1, keepdim=True)
    if sys.argv[1] != "stale":
        optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("way", "told_of"),
    [
        ("healthy", ""),
        ("stale", "stale gradients: this backward adds to the gradient of "),
        ("broadcast", "broadcast loss: sub of [16, 1] and [16] makes [16, 16]"),
    ],
)
def test_sharded_weights(tmp_path: Path, way: str, told_of: str) -> None:
    """FSDP2: faults are told as without it, and sharded weights are no replicas that differ."""
    (tmp_path / "train.py").write_text(SHARDED)
    (tmp_path / "guarded.py").write_text(
        "import sys\nfrom fxguard.cli.main import main\n"
        f"sys.exit(main(['run', '--recheck', '10', 'train.py', '{way}']))\n"
    )
    found = torchrun(tmp_path / "guarded.py")
    notes = [line for line in found.stderr.splitlines() if "fxguard: note: " in line]
    assert found.returncode == 0, found.stderr
    assert len(notes) == bool(told_of), notes
    assert all(told_of in line for line in notes)
