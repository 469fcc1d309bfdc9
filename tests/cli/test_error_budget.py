"""``fxguard run --error-budget``: how wrong the loss of a script's first step is in a dtype."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from support.programs import run_python
from support.schema import told

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        far = self.up(x) + 90
        return far - 90

torch.manual_seed(0)
model = Net()
x, y = torch.randn(8, 4), torch.randn(8, 4)
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(code, encoding="utf-8")
    options = options or ("--error-budget", "bfloat16")
    return run_python(folder, "-m", "fxguard", "run", *options, "train.py")


def true_error() -> float:
    """How far off the loss of MODEL is, by two runs of it."""
    torch.manual_seed(0)
    up = nn.Linear(4, 4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def loss(dtype: torch.dtype) -> torch.Tensor:
        made = up.to(dtype)(x.to(dtype)) + 90 - 90
        return nn.functional.mse_loss(made.double(), y.double())

    wide, low = loss(torch.float64), loss(torch.bfloat16)
    return float(((low - wide).abs() / wide).detach())


def said(done: subprocess.CompletedProcess[str]) -> float:
    """The error that is printed, of the loss."""
    assert done.returncode == 0, done.stderr
    found = re.search(r"^Net: bfloat16 changes the loss by ([\d.]+) %: ", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1]) / 100


LOSSES = {
    "a function": "F.mse_loss(model(x), y).backward()",
    "a module": "nn.MSELoss()(model(x), y).backward()",
    "by hand": "out = model(x)\nloss = (out.float() - y) ** 2\nloss.mean().backward()",
    "in parts": """
out = model(x)
total = torch.zeros(())
for one, other in zip(out, y):
    total += F.mse_loss(one, other) / 8
print("loss", total.item())
total.backward()
""",
    "in a buffer": """
out = model(x)
parts = torch.zeros(8)
for at in range(8):
    parts[at] = (out[at] - y[at]).square().mean()
parts.mean().backward()
""",
    "scaled": """
scaler = torch.amp.GradScaler("cpu", enabled=True)
scaler.scale(F.mse_loss(model(x), y)).backward()
""",
    "compiled": """
@torch.compile(backend="eager", fullgraph=True)
def loss_of(out, y):
    return (out - y).square().mean()
loss_of(torch.compile(model, backend="eager")(x), y).backward()
""",
    "with a metric": """
out = model(x)
shuffled = F.dropout(out.detach())
with torch.no_grad():
    metric = out.argmax(-1).float().mean()
loss = F.mse_loss(out, y)
loss.backward()
""",
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_of_the_script(loss: str, tmp_path: Path) -> None:
    """However it is written; the script ends there."""
    done = run(tmp_path, MODEL + loss + "\nraise AssertionError('not reached')")
    assert said(done) == pytest.approx(true_error(), rel=0.05)
    assert "add train.py:12: far = self.up(x) + 90" in done.stdout


def test_a_loss_that_the_model_returns(tmp_path: Path) -> None:
    code = """
import torch
from typing import NamedTuple
from torch import nn

class Said(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        logits = self.up(x)
        return Said(logits.square().mean(), logits)

torch.manual_seed(0)
Net()(torch.randn(8, 4)).loss.backward()
"""
    assert said(run(tmp_path, code)) < 0.02


OTHERS = {
    "a random loss": "F.mse_loss(F.dropout(model(x)), y).backward()",
    "no backward": "with torch.no_grad():\n    F.mse_loss(model(x), y)",
    "inference": "with torch.inference_mode():\n    F.mse_loss(model(x), y)",
    "a gradient of its own": "model(x).backward(torch.ones(8, 4))",
    "another model between": "head = nn.Linear(4, 1)\nhead(model(x)).sum().backward()",
    "a number between": "out = model(x)\n(model.up.weight * out.sum().item()).sum().backward()",
}


@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_else_the_output(loss: str, tmp_path: Path) -> None:
    """Where the loss is not known to be a function of what the model returned."""
    done = run(tmp_path, MODEL + loss)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Net: bfloat16 changes the output by "), done.stdout
    assert "far = self.up(x) + 90" in done.stdout


def test_two_models_of_one_loss(tmp_path: Path) -> None:
    """Each is looked at with what the other one returned."""
    code = MODEL + "other = nn.Linear(4, 4)\nF.mse_loss(model(x), other(x)).backward()"
    done = run(tmp_path, code)
    assert done.stdout.startswith("Net: bfloat16 changes the loss by ")
    assert "\nLinear: bfloat16 changes the loss by " in done.stdout


def test_the_model_as_it_was(tmp_path: Path) -> None:
    """With the buffers and the random numbers of its first call."""
    code = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
out = model(torch.randn(16, 8))
torch.randn(5)
print(f"{out.square().mean().item():.3f}")
out.square().mean().backward()
"""
    done = run(tmp_path, code, "--error-budget", "float32", "--report", "budget.json")
    assert done.returncode == 0, done.stderr
    assert "Sequential: float32 changes the loss by " in done.stdout
    record = json.loads((tmp_path / "budget.json").read_text("utf-8"))
    assert record["error"] < 1e-5
    assert record["of"] == "the loss"


def test_a_script_without_a_model_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "print('done')")
    assert done.returncode == 0
    assert "no model was called: there is nothing to measure in bfloat16" in done.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--error-budget", "float8_e4m3fn"), "float16"),
        (("--error-budget", "bf16", "--forecast", "bf16"), "give one of them"),
    ],
)
def test_wrong_use(options: tuple[str, ...], what: str, tmp_path: Path) -> None:
    done = run(tmp_path, MODEL, *options)
    assert done.returncode == 2
    assert what in done.stderr


def test_what_is_written(tmp_path: Path) -> None:
    """A page, and the record of the run."""
    options = ("--error-budget", "bf16", "--report", "page.html", "--json", "run.json")
    done = run(tmp_path, MODEL + LOSSES["a function"], *options)
    assert done.returncode == 0, done.stderr
    assert "Where the digits went" in (tmp_path / "page.html").read_text("utf-8")
    record = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert told("Run", record) == []
    assert [each["dtype"] for each in record["error_budgets"]] == ["bfloat16"]
    assert record["forecasts"] == []
    assert record["verdict"] == record["error_budgets"][0]["verdict"]
