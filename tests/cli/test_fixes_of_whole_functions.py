"""What ``fxguard run`` says of a function in which several operations exceed float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

SEVERAL = {
    "a correlation of two series": (
        "def correlation(a, b):\n"
        "    ab = (a * b).mean()\n"
        "    aa = a * a\n"
        "    bb = b.pow(2)\n"
        "    return ab / (aa.mean() * bb.mean()).sqrt()\n"
        "a, b = torch.full((4,), 300.0).half(), torch.full((4,), 400.0).half()\n"
        "print(correlation(a, b))\n",
        "compute all of `correlation` in float32, with .float() of what it is given: beside this, ",
    ),
    "a criterion under autocast": (
        "class Similarity(nn.Module):\n"
        "    def forward(self, p, q):\n"
        "        top = (2 * p * q).sum()\n"
        "        low = (p * p).sum() + (q * q).sum()\n"
        "        return 1 - top / low\n"
        "net = nn.Linear(2, 2, bias=False)\n"
        "nn.init.constant_(net.weight, 200.0)\n"
        "with torch.autocast('cpu', dtype=torch.float16):\n"
        "    out = net(torch.ones(3, 2))\n"
        "    loss = Similarity()(out, out.detach() + 1)\n"
        "loss.backward()\n",
        "compute all of `forward` in float32, with .float() of what it is given, under "
        "torch.autocast(..., enabled=False): beside this, ",
    ),
    "energies of a field": (
        "class Field:\n"
        "    def energies(self, u, v):\n"
        "        kinetic = (u ** 2).sum(-1)\n"
        "        cross = u.mul(v)\n"
        "        return kinetic + cross.sum(-1)\n"
        "u = torch.tensor([[300.0, 10.0]]).half()\n"
        "print(Field().energies(u, 2 * u).sum())\n",
        "compute all of `energies` in float32",
    ),
    "moments of a layer in float16": (
        "class Norm(nn.Module):\n"
        "    def forward(self, x):\n"
        "        second = x.square().mean(-1, keepdim=True)\n"
        "        third = (x * x.abs()).mean(-1, keepdim=True)\n"
        "        return x * third / second\n"
        "print(Norm().half()(torch.full((2, 8), 260.0).half()).sum().item())\n",
        "compute all of `forward` in float32, with .float() of what it is given: beside this, mul",
    ),
    "sums of a table": (
        "def center(table):\n"
        "    rows = table.sum(0)\n"
        "    columns = table.sum(1)\n"
        "    return rows.mean() - columns.mean()\n"
        "print(center(torch.full((8, 8), 9000.0).half()))\n",
        "compute all of `center` in float32, with .float() of what it is given: beside this, sum",
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_function_is_named(run_here: RunHere, name: str) -> None:
    text, fix = SEVERAL[name]
    err = run_here(HEAD + text).err
    first = next((line for line in err.splitlines() if "fix: " in line), "")
    assert fix in first, err
    assert len(first) <= 180, err


OTHERS = {
    "one overflow": (
        "def power(x):\n"
        "    s = x * x\n"
        "    return s.mean() + s.sum()\n"
        "print(power(torch.full((4,), 300.0).half()))\n"
    ),
    "in two functions": (
        "def one(x):\n"
        "    return x * x\n"
        "def other(x):\n"
        "    return x.pow(2)\n"
        "x = torch.full((4,), 300.0).half()\n"
        "print(one(x).sum(), other(x).sum())\n"
    ),
    "in float32": (
        "def both(x):\n"
        "    a = x * x\n"
        "    b = x.pow(3)\n"
        "    return a / b\n"
        "print(both(torch.full((4,), 1e30)))\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_overflows(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHERS[name]).err
    assert "overflow" in err.splitlines()[0], err
    assert "compute all of" not in err
