"""``fxguard run`` of scripts that write bad numbers to the weights of a model themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = """\
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
x, w = torch.randn(16, 4), net[0].weight
"""
TAIL = "print(net(x).pow(2).mean().item())\n"

# What is written before the call, the operation that is named, and its line.
WRONG = {
    "in place": (
        "with torch.no_grad():\n    w[2] = 0\n    w.div_(w.norm(dim=1, keepdim=True))\n",
        "div_",
        8,
    ),
    "a copy": (
        "z = torch.zeros(8, 1)\nz = z / z\nwith torch.no_grad():\n    w.copy_(z.expand(8, 4))\n",
        "div",
        7,
    ),
    "to its data": (
        "z = torch.zeros(8, 1)\nw.data.copy_(z / z * torch.ones(8, 4))\n",
        "div",
        7,
    ),
    "its data": ("z = torch.zeros(8, 4)\nw.data = z / z\n", "div", 7),
    "a new one": (
        "z = torch.zeros(8, 4)\nnet[0].weight = nn.Parameter(z.log())\n",
        "log",
        7,
    ),
    "a part": (
        "with torch.no_grad():\n    w[1] = torch.zeros(4).log()\n",
        "log",
        7,
    ),
    "a state": (
        "state = {name: each / (each.numel() - 8) for name, each in net.state_dict().items()}\n"
        "net.load_state_dict(state)\n",
        "div",
        6,
    ),
    "a vector": (
        "v = nn.utils.parameters_to_vector(net.parameters())\n"
        "v = v / (v - v).sum()\n"
        "nn.utils.vector_to_parameters(v, net.parameters())\n",
        "div",
        7,
    ),
    "a step by hand": (
        "net(x).mean().backward()\n"
        "with torch.no_grad():\n"
        "    for p in net.parameters():\n"
        "        p -= 0.1 * p.grad / (p.grad - p.grad).norm()\n",
        "div",
        9,
    ),
    "an average": (
        "decay = torch.tensor(0.999, dtype=torch.bfloat16)\n"
        "shadow = [torch.zeros_like(p, dtype=torch.bfloat16) for p in net.parameters()]\n"
        "with torch.no_grad():\n"
        "    for p, s in zip(net.parameters(), shadow):\n"
        "        s.mul_(decay).add_((1 - decay) * p.to(s.dtype))\n"
        "        p.copy_(s / (1 - decay ** 1))\n",
        "div",
        11,
    ),
    "a buffer": (
        "net = nn.Sequential(nn.BatchNorm1d(4), net).eval()\n"
        "z = torch.zeros(4)\nnet[0].running_var.copy_(z / z)\n",
        "div",
        8,
    ),
}

# What is bad for a while, or is another tensor's.
RIGHT = {
    "what is written over": (
        "with torch.no_grad():\n    w.div_(w - w)\n    w.nan_to_num_(0, 0, 0)\n"
    ),
    "a weight that is initialised": "with torch.no_grad():\n    nn.init.ones_(w.div_(0))\n",
    "another's": "other = nn.Linear(4, 8)\nwith torch.no_grad():\n    other.weight.div_(0)\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_made_it_is_named(run_here: RunHere, name: str) -> None:
    body, operation, line = WRONG[name]
    ran = run_here(HEAD + body + TAIL)
    first = ran.err.partition("\n")[0]
    assert first.startswith(f"{operation} made ")
    assert f"(script.py:{line})" in first
    assert "the checkpoint" not in ran.err


@pytest.mark.parametrize("name", RIGHT)
def test_what_harms_no_model_is_none(ends_as_ever: EndsAsEver, name: str) -> None:
    assert "nothing found" in ends_as_ever(HEAD + RIGHT[name] + TAIL)
