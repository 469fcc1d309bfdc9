"""What ``fxguard run`` says of a bound such as ``1 - 1e-8``, which is 1 in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

LOST = {
    "a ball, by a class": (
        "class Ball:\n"
        "    def __init__(self, eps=1e-8):\n"
        "        self.limit = 1 - eps\n"
        "    def retract(self, z):\n"
        "        length = z.norm(dim=-1, keepdim=True)\n"
        "        return z * torch.minimum(length, torch.tensor(self.limit)) / length\n"
        "    def depth(self, z):\n"
        "        r = z.norm(dim=-1)\n"
        "        return torch.log((1 + r) / (1 - r))\n"
        "ball = Ball()\n"
        "points = ball.retract(torch.tensor([[3.0, 0.0], [0.1, 0.2]]))\n"
        "print(ball.depth(points).sum())\n",
        "take 1 - 1e-5 for `1 - eps` (script.py:6): in float32 that is 1, so it bounds nothing",
    ),
    "a correlation, from turn to turn": (
        "R = 1.0 - 1e-9\n"
        "def clipped(a):\n"
        "    return torch.clamp(a, -R, R)\n"
        "def quadratic(x, y, c):\n"
        "    return (x * x - 2 * c * x * y + y * y) / (1 - c ** 2)\n"
        "corr = torch.tensor([0.2, 0.9])\n"
        "for _ in range(4):\n"
        "    value = quadratic(torch.tensor(0.3), torch.tensor(0.6), corr)\n"
        "    corr = clipped(corr * 1.3)\n"
        "print(value.sum())\n",
        "keep c below 1 where it is made, in clamp (script.py:6), by clamp(max=1 - 5e-07)",
    ),
    "rows of an embedding, in place": (
        "class Places(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(6, 2)\n"
        "    def forward(self, i):\n"
        "        v = self.table(i)\n"
        "        return (1 / (1 - v.square().sum(-1))).log()\n"
        "@torch.no_grad()\n"
        "def keep_inside(net, most=0.999999999):\n"
        "    for w in net.parameters():\n"
        "        n = w.norm(dim=1, keepdim=True)\n"
        "        w.mul_((most / n).clamp(max=1.0))\n"
        "net = Places()\n"
        "nn.init.constant_(net.table.weight, 0.75)\n"
        "net.table.weight.data[:, 1] = 0\n"
        "for _ in range(3):\n"
        "    loss = net(torch.arange(6)).mean()\n"
        "    net.table.weight.data.mul_(1.5)\n"
        "    keep_inside(net)\n"
        "print(loss.item())\n",
        "take 1 - 1e-5 for `0.999999999` (script.py:12)",
    ),
    "probabilities in float16": (
        "TINY = 1e-4\n"
        "def bounded(p):\n"
        "    q = torch.where(p > 1 - TINY, 1 - TINY, p)\n"
        "    return q\n"
        "def rest(p):\n"
        "    left = torch.log(1 - p)\n"
        "    return left\n"
        "p = bounded(torch.tensor([0.5, 1.0]).half())\n"
        "print(rest(p).sum())\n",
        "take 1 - 5e-3 for `1 - TINY` (script.py:6): in float16 that is 1, so it bounds",
    ),
    "a number of Python that is 1": (
        "def inside(u):\n"
        "    return u.clamp(-1 + 1e-17, 1 - 1e-17)\n"
        "class Map:\n"
        "    def back(self, u):\n"
        "        w = u.clone()\n"
        "        return u / torch.sqrt(1 - w ** 2)\n"
        "u = inside(torch.tensor([0.5, 1.0], dtype=torch.float64))\n"
        "print(Map().back(u).sum())\n",
        "take 1 - 1e-12 for `1 - 1e-17` (script.py:5), and so at -1: in float64 that is 1",
    ),
    "the norm of rows": (
        "EPS = 10 ** -9\n"
        "w = torch.eye(2) * torch.tensor([0.5, 4.0])\n"
        "w = torch.renorm(w, 2, 0, 1 - EPS)\n"
        "def factor(a):\n"
        "    s = a.pow(2).sum(1)\n"
        "    return 2 / (1.0 - s)\n"
        "print(factor(w).sum())\n",
        "take 1 - 1e-5 for `1 - EPS` (script.py:6)",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_the_bound_is_named(run_here: RunHere, name: str) -> None:
    """It stands in another function, or in the turn before."""
    text, fix = LOST[name]
    err = run_here(HEAD + text).err
    assert fix in next(line for line in err.splitlines() if "fix: " in line), err
    assert len(next(line for line in err.splitlines() if "fix: " in line)) <= 175, err


OTHERS = {
    "another number's bound": (
        "def cost(p, y):\n"
        "    p = p.clamp(1e-8, 1 - 1e-8)\n"
        "    return -(y * p.log()).mean()\n"
        "rho = torch.tensor([0.5, 1.0])\n"
        "print(cost(torch.rand(3), torch.ones(3)))\n"
        "print((rho / (1 - rho ** 2)).sum())\n"
    ),
    "a bound that float32 holds": (
        "def inside(x):\n"
        "    return x.clamp(max=1 - 1e-5)\n"
        "x = torch.tensor([0.5, 1.0])\n"
        "y = inside(x)\n"
        "print((y / (1 - x)).sum())\n"
    ),
    "a bound that float64 holds": (
        "def inside(x):\n"
        "    return torch.where(x > 1 - 1e-8, 1 - 1e-8, x).round()\n"
        "x = inside(torch.tensor([0.25, 1.0], dtype=torch.float64))\n"
        "print((1 / (1 - x)).sum())\n"
    ),
    "a mask": (
        "keep = 1 - 1e-9\n"
        "x = torch.rand(3) * keep\n"
        "mask = torch.tensor([1.0, 1.0, 1.0])\n"
        "print((x.sum() / (1 - mask).sum()))\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_zeros(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHERS[name]).err
    assert "made" in err.splitlines()[0], err
    assert "bounds nothing" not in err


@pytest.mark.parametrize(
    "text",
    [
        "rest = 1 - u\nprint((u.log() - rest.log()).sum())\n",
        "def rest(x):\n    return 1.0 - x\nprint((torch.log(u) - torch.log(rest(u))).sum())\n",
    ],
)
def test_what_is_left_to_1_has_a_line_of_its_own(run_here: RunHere, text: str) -> None:
    """The number is still bounded where it is made."""
    begin = "import torch\nu = torch.tensor([0.5, 1.0]).clamp(1e-8, 1 - 1e-8)\n"
    fixes = run_here(begin + text).fixes
    assert " inside (0, 1) where it is made, in clamp (script.py:2), by clamp(" in fixes[0], fixes
