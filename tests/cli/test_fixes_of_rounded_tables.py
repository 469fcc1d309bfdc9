"""What ``fxguard run`` says of tables that were rounded to bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

TABLES = {
    "a schedule of noise": (
        "betas = torch.linspace(1e-4, 0.02, 50)\n"
        "abar = torch.cumprod(1 - betas, 0).to(torch.bfloat16)\n"
        "def weight(t):\n"
        "    return torch.log(1 - abar[t])\n"
        "print(weight(torch.tensor([0, 40])).sum())\n",
        "keep `abar`, which script.py:5 rounds, in float32: bfloat16 holds nothing between 0.9961",
    ),
    "rates of a class": (
        "class Decay:\n"
        "    def __init__(self, rates):\n"
        "        kept = torch.exp(-rates)\n"
        "        self.kept = kept.half()\n"
        "    def whiten(self, x, i):\n"
        "        return x / (1 - self.kept[i]).sqrt()\n"
        "decay = Decay(torch.tensor([1e-5, 0.1]))\n"
        "print(decay.whiten(torch.ones(2).half(), torch.tensor([0, 1])).sum())\n",
        "keep `self.kept`, which script.py:7 rounds, in float32: float16 holds nothing between",
    ),
    "a row of levels in a variable's dtype": (
        "DT = torch.bfloat16\n"
        "levels = torch.linspace(0.9995, 0.01, 20, dtype=DT)\n"
        "def variance(t):\n"
        "    a = levels[t]\n"
        "    return 1 / (1 - a)\n"
        "print(sum(variance(t) for t in range(20)))\n",
        "which script.py:5 rounds, in float32",
    ),
    "a buffer of a model that is cast whole": (
        "class Memory(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(4, 4)\n"
        "        tau = torch.tensor([1e3, 5.0, 2.0, 1.0])\n"
        "        self.register_buffer('leak', torch.exp(-1 / tau))\n"
        "    def forward(self, x):\n"
        "        return self.fc(x) / (1.0 - self.leak)\n"
        "net = Memory().to(dtype=torch.bfloat16)\n"
        "print(net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().item())\n",
        "keep `self.leak`, which script.py:12 rounds, in float32",
    ),
    "a model whose part is guarded": (
        "class Diffusion(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        abar = torch.cumprod(1 - torch.linspace(1e-4, 0.1, 50), 0)\n"
        "        self.register_buffer('abar', abar)\n"
        "        self.net = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 2))\n"
        "    def loss(self, x, t):\n"
        "        sigma = (1 - self.abar[t]).sqrt()[:, None]\n"
        "        return ((x - self.net(x)) / sigma).float().pow(2).mean()\n"
        "model = Diffusion().to(torch.bfloat16)\n"
        "x = torch.ones(3, 2, dtype=torch.bfloat16)\n"
        "model.loss(x, torch.tensor([0, 9, 40])).backward()\n",
        "keep `self.abar`, which script.py:13 rounds, in float32: bfloat16 holds nothing between",
    ),
    "a logarithm that divides": (
        "gamma = torch.sigmoid(torch.tensor([9.0, 1.0])).bfloat16()\n"
        "def life(g):\n"
        "    return 1 / torch.log(g)\n"
        "print(life(gamma).sum())\n",
        "which script.py:4 rounds, in float32: bfloat16 holds nothing between 0.9961 and 1",
    ),
    "probabilities that are kept": (
        "class Net(nn.Module):\n"
        "    def forward(self, z):\n"
        "        return torch.sigmoid(z)\n"
        "old = Net()(torch.tensor([0.1, 12.0])).half()\n"
        "def surprise(p):\n"
        "    return -torch.log1p(-p)\n"
        "print(surprise(old).sum())\n",
        "which script.py:7 rounds, in float32",
    ),
}
EQUAL = {
    "times of steps": (
        "t = torch.linspace(0, 1, 1000).to(torch.bfloat16)\n"
        "x = torch.rand(1000, dtype=torch.bfloat16)\n"
        "def slope(x, t):\n"
        "    dt = t[1:] - t[:-1]\n"
        "    return (x[1:] - x[:-1]) / dt\n"
        "print(slope(x, t).sum())\n",
        "take the difference in sub (script.py:7) in float32, before script.py:4 rounds",
    ),
    "logarithms of levels": (
        "class Sampler:\n"
        "    def __init__(self, n):\n"
        "        self.sigmas = torch.logspace(1, -2, n).half()\n"
        "    def step(self, i, d):\n"
        "        h = self.sigmas[i + 1] - self.sigmas[i]\n"
        "        return d / h\n"
        "s = Sampler(20000)\n"
        "print(sum(s.step(i, torch.tensor(1.0).half()) for i in range(3)))\n",
        "in float32, before script.py:6 rounds",
    ),
    "knots": (
        "knots = torch.cumsum(torch.full((300,), 0.01), 0).bfloat16()\n"
        "width = torch.diff(knots)\n"
        "print((1 / width).sum())\n",
        "take the difference in diff (script.py:5) in float32, before script.py:4 rounds",
    ),
}


@pytest.mark.parametrize("name", [*TABLES, *EQUAL])
def test_the_line_that_rounds_is_named(run_here: RunHere, name: str) -> None:
    text, fix = {**TABLES, **EQUAL}[name]
    err = run_here(HEAD + text).err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert fix in first, err
    assert len(first) <= 185, err


OTHERS = {
    "a mask": (
        "mask = torch.tensor([1.0, 0.0, 1.0]).to(torch.bfloat16)\nprint((1 / (1 - mask)).sum())\n"
    ),
    "a row that ends at 1": (
        "t = torch.linspace(0, 1, 10).to(torch.bfloat16)\nprint((1 / (1 - t)).sum())\n"
    ),
    "a decay that begins at 1": (
        "t = torch.arange(10) / 10\n"
        "left = torch.exp(-t).to(torch.bfloat16)\nprint((1 / (1 - left)).sum())\n"
    ),
    "times that are equal": (
        "t = torch.tensor([0.5, 0.5, 0.75]).to(torch.bfloat16)\n"
        "print((1 / (t[1:] - t[:-1])).sum())\n"
    ),
    "a mask in front of a guarded part": (
        "class Gate(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('mask', torch.tensor([1.0, 0.0]))\n"
        "        self.net = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 2))\n"
        "    def loss(self, x):\n"
        "        open = 1 - self.mask\n"
        "        return (self.net(x) / open).float().pow(2).mean()\n"
        "Gate().to(torch.bfloat16).loss(torch.ones(3, 2, dtype=torch.bfloat16)).backward()\n"
    ),
    "a table in float32": (
        "keep = torch.cumprod(torch.tensor([1.0, 0.9]), 0)\n"
        "half = keep.to(torch.bfloat16)\n"
        "print(half.sum(), (1 / (1 - keep)).sum())\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_zeros(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHERS[name]).err
    assert "made" in err.splitlines()[0], err
    assert "rounds" not in err
