"""``fxguard run`` names what made a bad number beside the model that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.command_line import status

HEAD = (
    "import torch\n"
    "from torch import nn\n"
    "torch.manual_seed(0)\n"
    "net = nn.Linear(4, 1)\n"
    "x = torch.randn(5, 4)\n"
)

# What is wrong, and the first line of the verdict.
WRONG = {
    "an advantage": (
        "with torch.no_grad():\n"
        "    a = net(x[:1]).squeeze(-1) + 1\n"
        "    a = (a - a.mean()) / (a.std() + 1e-8)\n"
        "(net(x[:1]).squeeze(-1) * a).mean().backward()\n",
        "std made NaN (script.py:8): a single element has no deviation",
    ),
    "a target of a teacher": (
        "teacher = nn.Linear(4, 3)\n"
        "with torch.no_grad():\n"
        "    q = torch.exp(teacher(x) * 1000)\n"
        "    q = q / q.sum(1, keepdim=True)\n"
        "(q * net(x)).sum().backward()\n",
        "exp made inf (script.py:8): overflow",
    ),
    "weights of a schedule": (
        "snr = torch.linspace(1, 0, 5)\n"
        "weight = snr.clamp(max=0.5) / snr\n"
        "(weight * net(x).squeeze(-1) ** 2).mean().backward()\n",
        "div made NaN (script.py:7): 0 / 0",
    ),
    "an argument": (
        "x[:, 2] = 1\nx = (x - x.mean(0)) / x.std(0)\nnet(x).sum().backward()\n",
        "div made NaN (script.py:7): 0 / 0",
    ),
}

# Scripts that are right.
RIGHT = {
    "a metric of a class that does not occur": "net(x).sum().backward()\n"
    "print((torch.zeros(2) / torch.zeros(2)).mean().item())\n"
    "net(x).sum().backward()\n",
    "what is left out of a target": "target = torch.log(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))\n"
    "keep = target.isfinite()\n"
    "(net(x).squeeze(-1)[keep] - target[keep]).pow(2).mean().backward()\n",
    "an intended mask": "mask = torch.full((5, 5), float('-inf')).triu(1)\n"
    "scores = (net(x) @ net(x).T + mask).softmax(-1)\n"
    "(scores @ net(x)).sum().backward()\n",
    "a best value": "best = float('inf')\n"
    "for _ in range(3):\n"
    "    loss = net(x).pow(2).mean()\n"
    "    loss.backward()\n"
    "    best = torch.minimum(torch.tensor(best), loss.detach()).item()\n"
    "print(round(best, 4))\n",
}


def run(here: Path, capsys: Any, text: str) -> tuple[Any, str, str]:
    """The exit status of a script, and what it has printed."""
    here.joinpath("script.py").write_text(HEAD + text)
    found = status("run", "script.py")
    return found, *capsys.readouterr()


@pytest.mark.parametrize("name", WRONG)
def test_the_line_of_the_script_is_named(here: Path, capsys: Any, name: str) -> None:
    """With its cause, and with what read it."""
    text, verdict = WRONG[name]
    found, _, err = run(here, capsys, text)
    assert found == 3
    assert err.splitlines()[0] == verdict
    assert "it was read as " in err


@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_ends_as_ever(here: Path, capsys: Any, name: str) -> None:
    """It prints what it prints without fxguard."""
    exec(compile(HEAD + RIGHT[name], "script.py", "exec"), {"__name__": "plain"})
    expected = capsys.readouterr().out
    found, out, err = run(here, capsys, RIGHT[name])
    assert found == 0, err
    assert out == expected
    assert "nothing found" in err


def test_what_a_model_makes_is_blamed_on_the_model(here: Path, capsys: Any) -> None:
    """Something bad beside it that it has not read is no reason."""
    text = (
        "unused = torch.zeros(2) / torch.zeros(2)\n"
        "with torch.no_grad():\n"
        "    net.weight.fill_(1e30)\n"
        "(net(x * 1e10) * 1.0).sum().backward()\n"
    )
    found, _, err = run(here, capsys, text)
    assert found == 3
    assert "linear" in err.splitlines()[0]
    assert "it was read as " not in err
