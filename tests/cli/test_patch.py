"""``fxguard run --patch FILE`` and ``--try-patch``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.programs import run_python

GNN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x, adj):
        deg = adj.sum(1)
        dinv = deg.pow(-0.5)  # of each node
        return self.lin(x) * dinv[:, None]


torch.manual_seed(0)
model = Net()
adj = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
for step in range(3):
    loss = model(torch.ones(2, 2), adj).pow(2).mean()
    loss.backward()
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(code, encoding="utf-8")
    return run_python(folder, "-m", "fxguard", "run", *options, "train.py")


def test_the_patch_is_written_and_applies(tmp_path: Path) -> None:
    done = run(tmp_path, GNN, "--patch", "fix.diff")
    assert done.returncode == 3
    assert "the patch is in fix.diff; patch -p1 < fix.diff" in done.stderr
    assert "tried on the numbers of the first bad element: it is 1 there" in done.stderr
    assert (tmp_path / "train.py").read_text() == GNN
    subprocess.run(["git", "apply", "fix.diff"], cwd=tmp_path, check=True)
    fixed = (tmp_path / "train.py").read_text()
    assert fixed == GNN.replace("deg.pow(", "deg.clamp(min=1).pow(")
    done = run(tmp_path, fixed, "--patch", "again.diff")
    assert done.returncode == 0
    assert "nothing was found in this process, so nothing was written to again.diff" in done.stderr
    assert not (tmp_path / "again.diff").exists()


@pytest.mark.slow  # it sleeps; tests/patch/test_program_trial.py runs on each change
def test_the_patch_is_tried(tmp_path: Path) -> None:
    """The first run takes long, so that the second one has the time to start Python."""
    sleeps = "import time\nif 'fxguard-patch-' not in __file__:\n    time.sleep(10)\n"
    done = run(tmp_path, sleeps + GNN, "--patch", "fix.diff", "--try-patch")
    assert done.returncode == 3
    assert "what it writes to absolute paths" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "with the patch the program ran to its end without an inf or a NaN: checked 3 " in last
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fix.diff", "train.py"]


def test_a_refusal_says_why(tmp_path: Path) -> None:
    code = GNN.replace("deg.pow(-0.5)", "deg.pow(-0.5) + deg.pow(-0.5)")
    done = run(tmp_path, code, "--patch", "fix.diff")
    assert done.returncode == 3
    assert "fxguard: no patch: 2 expressions there are a ** y" in done.stderr
    assert not (tmp_path / "fix.diff").exists()


def test_the_options_are_checked_first(tmp_path: Path) -> None:
    done = run(tmp_path, GNN, "--try-patch")
    assert done.returncode == 2
    assert "--try-patch needs --patch FILE" in done.stderr
    done = run(tmp_path, GNN, "--patch", "none/fix.diff")
    assert done.returncode == 2
    assert "no such folder for the patch" in done.stderr
