"""``fxguard run --forecast``: what the first step of a script would do in another dtype."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.programs import run_python

TRAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.up(x) * {factor}).pow(2)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 4)).sum() * {scale}
    loss.backward()
    optimizer.step()
    print("step", step)
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(code, encoding="utf-8")
    return run_python(folder, "-m", "fxguard", "run", *options, "train.py")


def test_the_first_step_is_forecast_and_ends_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN.format(factor=1e5, scale=1), "--forecast", "float16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Net: in float16 1 of 4 operations fails")
    assert "mul (train.py:11): overflow, needs " in done.stdout
    assert "step" not in done.stdout


def test_the_gradient_that_the_script_hands_in_is_looked_at(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN.format(factor=1, scale=1e-9), "--forecast", "float16")
    assert done.returncode == 0, done.stderr
    assert "none of 4 operations fails; 1 gradient of an output fails" in done.stdout
    assert "underflow" in done.stdout


def test_an_output_that_gets_no_gradient_is_forecast_without(tmp_path: Path) -> None:
    code = """
import torch

class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return None

Constant.apply(torch.nn.Linear(2, 2)(torch.ones(1, 2))).backward()
"""
    done = run(tmp_path, code, "--forecast", "float16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Linear: in float16 none of 1 operation fails")


def test_without_a_backward_the_second_call_ends_it(tmp_path: Path) -> None:
    code = """
import torch
model = torch.nn.Linear(2, 2).eval()
for step in range(3):
    with torch.no_grad():
        model(torch.ones(1, 2) * 1e5)
    print("step", step)
"""
    done = run(tmp_path, code, "--forecast", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0\nLinear: in bfloat16 none of 1 operation fails")
    assert "step 1" not in done.stdout


def test_two_models_of_one_step(tmp_path: Path) -> None:
    code = """
import torch
torch.manual_seed(0)
first, last = torch.nn.Linear(2, 2), torch.compile(torch.nn.Bilinear(2, 2, 1), backend="aot_eager")
x = first(torch.ones(1, 2))
last(x, x).sum().backward()
raise AssertionError("not reached")
"""
    done = run(tmp_path, code, "--forecast", "float16")
    assert done.returncode == 0, done.stderr
    assert "Linear: in float16 none of 1 operation fails" in done.stdout
    assert "Bilinear: in float16 none of 1 operation fails" in done.stdout


def test_a_script_without_a_model_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "print('done')", "--forecast", "float16")
    assert done.returncode == 0
    assert "no model was called" in done.stderr


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "BFloat16"])
def test_a_dtype_has_several_names(tmp_path: Path, name: str) -> None:
    """The short one, that of torch's module, in any case."""
    done = run(
        tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))", "--forecast", name
    )
    assert done.returncode == 0, done.stderr
    assert "Linear: in bfloat16 none of 1 operation fails" in done.stdout


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--forecast", "int8")
    assert done.returncode == 2
    assert "float16" in done.stderr


def test_float8_and_a_page_for_each_model(tmp_path: Path) -> None:
    code = """
import torch
first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
last(first(torch.randn(4, 16))).sum().backward()
"""
    done = run(tmp_path, code, "--forecast", "float8_e4m3fn", "--report", "page.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Linear: in float8_e4m3fn none of 1 matrix product fails") == 2
    for name in ("page.html", "page-2.html"):
        assert "Forecast: float8_e4m3fn" in (tmp_path / name).read_text()


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN, "--forecast", "float16", "--report", "missing/page.html")
    assert done.returncode == 2
    assert "no such folder for the report" in done.stderr
