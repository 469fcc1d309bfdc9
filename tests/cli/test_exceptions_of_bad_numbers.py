"""``fxguard run`` names what made the bad number that an exception of the script came of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.programs import run_python

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]


@pytest.fixture(autouse=True)
def checks_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that compiles has turned them off in this process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


HEAD = "import math\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
BAD = "x = torch.zeros(3, 3)\np = x / x.sum()\n"  # on lines 5 and 6
MODEL = "net = nn.Linear(3, 3)\nnet(torch.ones(2, 3)).sum().backward()\n"

VERDICT = "div made NaN (script.py:{}): 0 / 0"

# What the script does with the bad tensor, the exception, and who has read it.
RAISES = {
    "draws": ("torch.multinomial(p, 1)\n", "RuntimeError", "torch.multinomial, which raised"),
    "a distribution": (
        "torch.distributions.Normal(p, 1.0)\n",
        "ValueError",
        "at script.py:{}, which raised ValueError",
    ),
    "logits": (
        "torch.distributions.Categorical(logits=p)\n",
        "ValueError",
        "at script.py:{}, which raised ValueError",
    ),
    "cholesky": ("torch.linalg.cholesky(p)\n", "LinAlgError", "torch.linalg.cholesky, which"),
    "eigh": ("torch.linalg.eigh(p)\n", "LinAlgError", "torch.linalg.eigh, which raised"),
    "svd": ("torch.linalg.svd(p)\n", "LinAlgError", "torch.linalg.svd, which raised"),
    "an integer": ("int(p.mean())\n", "ValueError", "torch.Tensor.__int__, which raised"),
    "rounding": ("round(p.mean().item())\n", "ValueError", "item; then the script raised Val"),
    "a batch of integers": ("x[p[0].long()]\n", "IndexError", "__getitem__, which raised Index"),
    "an index": ("i = p.mean().long().item()\nx[i]\n", "IndexError", "__getitem__, which raised"),
    "a shape": ("n = p.mean().int().item()\ntorch.ones(n)\n", "RuntimeError", "torch.ones, which"),
    "an assertion": ("assert torch.isfinite(p).all()\n", "AssertionError", "torch.isfinite; then"),
    "a check": (
        "if math.isnan(p.mean().item()):\n    raise RuntimeError('the loss is NaN')\n",
        "RuntimeError",
        "item; then the script raised RuntimeError",
    ),
    "numpy": (
        "import numpy as np\nnp.random.choice(3, p=p[0].numpy())\n",
        "ValueError",
        "numpy; then the script raised ValueError",
    ),
    "a cause": (
        "try:\n    torch.linalg.cholesky(p)\nexcept RuntimeError as error:\n"
        "    raise KeyError('no factor') from error\n",
        "KeyError",
        "torch.linalg.cholesky, which raised",
    ),
}


@pytest.mark.parametrize("model", ["", MODEL], ids=["alone", "beside a model"])
@pytest.mark.parametrize("name", RAISES)
def test_what_made_the_bad_number_is_named(run_here: RunHere, name: str, model: str) -> None:
    """The exception is that of the script, and stands behind the report."""
    text, error, reader = RAISES[name]
    ran = run_here(HEAD + model + BAD + text)
    lines = 2 * bool(model)
    assert ran.status == 3
    assert ran.err.splitlines()[0] == VERDICT.format(6 + lines)
    assert f"why: it was read {'' if reader.startswith('at') else 'by '}" in ran.err
    assert reader.format(7 + lines) in ran.err
    assert "Traceback" in ran.err.split("why: it was read ")[1]
    assert error in ran.err.split("Traceback")[-1]


# The same from what a model returned, which belongs to its loss.
LOSSES = {
    "draws": "torch.multinomial(p, 1)\n",
    "a distribution": "torch.distributions.Categorical(logits=p)\n",
    "cholesky": "torch.linalg.cholesky(p)\n",
    "an integer": "int(p.mean())\n",
    "rounding": "m = p.mean()\nround(m.item())\n",
    "an index": "m = p.mean()\nx[m.long()]\n",
    "a check": "loss = p.mean()\nassert not torch.isnan(loss)\n",
    "an end": "loss = p.mean()\nif not math.isfinite(loss.item()):\n    raise SystemExit(1)\n",
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_made_it_in_a_loss_is_named(run_here: RunHere, name: str) -> None:
    """As at its backward, which never comes."""
    text = "net = nn.Linear(3, 3)\nx = net(torch.ones(3, 3))\np = (x - x) / (x - x).sum()\n"
    ran = run_here(HEAD + text + LOSSES[name])
    assert ran.status == 3
    assert ran.err.splitlines()[0] == VERDICT.format(7)
    assert "why: it was read " in ran.err


def test_inside_a_forward_it_is_named_as_ever(run_here: RunHere) -> None:
    """The batch of the model ends, with what its forward raised."""
    text = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(3, 3)\n"
        "    def forward(self, x):\n"
        "        x = x / x.std()\n"
        "        return torch.multinomial(self.layer(x).softmax(-1), 1)\n"
        "Model()(torch.zeros(3, 3))\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert ran.err.splitlines()[0] == VERDICT.format(10)
    assert "forward then raised RuntimeError" in ran.err


# Exceptions that came of something else, though something bad is there.
OTHERS = {
    "a shape": ("p @ torch.ones(4)\n", "RuntimeError"),
    "an index": ("p[5]\n", "IndexError"),
    "an index in a tensor": ("p[torch.tensor([7])]\n", "IndexError"),
    "a dtype": ("p @ x.double()\n", "RuntimeError"),
    "another matrix": ("torch.linalg.cholesky(-torch.eye(3))\n", "LinAlgError"),
    "another distribution": ("torch.distributions.Normal(0.0, -1.0)\n", "ValueError"),
    "something handled": (
        "try:\n    torch.linalg.cholesky(p)\nexcept RuntimeError:\n    pass\n{}['a']\n",
        "KeyError",
    ),
    "something read long ago": (
        "p.mean().item()\ny = x + 1\nassert y.sum().item() == 0\n",
        "AssertionError",
    ),
    "an end without a fault": ("torch.isnan(p).any()\nraise SystemExit(0)\n", ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_exception_of_something_else_is_no_detection(run_here: RunHere, name: str) -> None:
    """It ends the script as ever."""
    text, error = OTHERS[name]
    ran = run_here(HEAD + MODEL + BAD + text)
    assert ran.status in ((1, 0)[not error], None)
    assert not [line for line in ran.err.splitlines() if line.startswith("div made NaN")]
    assert error in ran.err


HANDLED = (
    "for _ in range(50):\n"
    "    try:\n"
    "        torch.linalg.cholesky(p)\n"
    "    except RuntimeError as error:\n"
    "        print(type(error).__name__, torch.rand(1).item())\n"
)


def test_a_script_that_handles_it_goes_on(run_here: RunHere, capsys: Any) -> None:
    """With the same random numbers, and nothing is told."""
    exec(compile(HEAD + MODEL + BAD + HANDLED, "script.py", "exec"), {})
    expected = capsys.readouterr().out
    ran = run_here(HEAD + MODEL + BAD + HANDLED)
    assert ran.status == 0, ran.err
    assert ran.out == expected


def test_with_warnings_the_status_is_that_of_the_script(here: Path, run_here: RunHere) -> None:
    """The report is printed all the same."""
    from support.command_line import status

    here.joinpath("other.py").write_text(HEAD + BAD + "torch.multinomial(p, 1)\n")
    assert status("run", "--on-detect", "warn", "other.py") == 1
    assert "torch" in sys.modules


def test_distributions_check_their_arguments_beside_a_model(run_here: RunHere) -> None:
    """TorchDynamo turns that off in its process; nobody has asked for it here."""
    ran = run_here(HEAD + MODEL + "torch.distributions.Normal(0.0, -1.0)\n")
    assert ran.status == 1
    assert "to satisfy the constraint GreaterThan" in ran.err


def test_a_compiler_that_the_script_asks_for_turns_checks_off(here: Path) -> None:
    """As it does without fxguard, and from then on."""
    ask = "print(torch.distributions.Distribution._validate_args)\n"
    text = "f = torch.compile(lambda x: x + 1, backend='eager')\n"
    here.joinpath("script.py").write_text(HEAD + MODEL + ask + text + ask)
    assert run_python(here, "-m", "fxguard", "run", "script.py").stdout == "True\nFalse\n"
