"""What TorchDynamo would tell those who compile a model is kept from those who do not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import fxguard

pytestmark = pytest.mark.slow

# TorchDynamo fails on the first model, because a defect is planted in it. On the others it warns:
# of a number that is taken from a tensor, and of a cached function.
SCRIPT = """
import functools
import torch
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable
import fxguard

call_method = TensorVariable.call_method

def with_defect(self, tx, name, *args):
    if name == "sinh":
        raise AssertionError("a defect")
    return call_method(self, tx, name, *args)

TensorVariable.call_method = with_defect

class Fails(nn.Module):
    def forward(self, x):
        return x.sinh() + 1

class Reads(nn.Module):
    def forward(self, x):
        return x * x.sum().item()

@functools.lru_cache
def factor():
    return 2

class Cached(nn.Module):
    def forward(self, x):
        return x * factor()

torch._dynamo.config.suppress_errors = True
x = torch.arange(4.0)
"""

GUARDED = """
for kind in (Fails, Reads, Cached):
    model = fxguard.instrument(kind())
    assert torch.equal(model(x), kind()(x))
    print(fxguard.guard_of(model).coverage())
"""

COMPILED = """
fxguard.instrument(nn.Linear(4, 4))(x)
for kind in (Fails, Reads, Cached):
    torch.compile(kind(), backend="eager")(x)
"""


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", SCRIPT + script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_eager_model_runs_without_a_word() -> None:
    """Nobody asked for a compiler; coverage names what failed, which was checked all the same."""
    done = run(GUARDED, "-W", "error::UserWarning")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    fails, reads, cached = done.stdout.splitlines()
    assert fails.startswith("checked 2 of 2 operations in 0 graphs and 2 between graphs")
    assert fails.endswith("AssertionError in TorchDynamo")
    assert "1 graph break" in reads
    assert cached == "checked 1 of 1 operations in 1 graph"


@pytest.mark.parametrize("advice", ["a defect", "CAPTURE_SCALAR_OUTPUTS", "lru_cache"])
def test_who_compiles_is_told_as_ever(advice: str, told: str) -> None:
    """Whether another model was guarded before or not."""
    assert advice in told


@pytest.fixture(scope="module")
def told() -> str:
    """What is written to the terminal while models are compiled."""
    done = run(COMPILED)
    assert done.returncode == 0, done.stderr
    return done.stderr


SETTINGS = """
net = fxguard.instrument(nn.Linear(4, 4))
for _ in range(2):
    net(x)
    print(torch.is_warn_always_enabled(), torch._dynamo.config.issue_3_13_0_warning)
    torch._dynamo.reset()
"""


def test_a_capture_leaves_the_settings_of_warnings() -> None:
    """TorchDynamo's advice about Python 3.13.0 is switched off during the capture alone."""
    done = run(SETTINGS)
    assert (done.stdout, done.stderr) == ("False True\n" * 2, "")


def test_a_failing_operation_is_told_by_python_alone() -> None:
    """What the fake tensors of a capture say about it is not printed; the error is."""
    failing = "fxguard.instrument(nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)))(x)\n"
    done = run(failing)
    assert done.returncode == 1
    assert "fake_tensor" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "mat1 and mat2 shapes" in last
    asked = run("import logging; torch._logging.set_logs(all=logging.INFO)\n" + failing)
    assert "failed while attempting to run meta" in asked.stderr


class Scaled(nn.Module):
    """A number that it holds decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("asked", [False, True])
def test_guards_see_attributes_and_a_capture_warns_of_no_python(
    asked: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """On Python 3.13.0 TorchDynamo has a setting against its warning that blinds its guards."""
    model, plain = Scaled(), Scaled()
    model.load_state_dict(plain.state_dict())
    fxguard.instrument(model)
    run = torch.compile(model, backend="eager") if asked else model
    x = torch.ones(2, 4)
    for scale in (1.0, 0.5, 2.0):
        model.scale = plain.scale = scale
        assert torch.equal(run(x), plain(x))
    if not asked:
        assert [str(each.message) for each in recwarn] == []
