"""What ``fxguard run`` says of a step of Newton's method whose divisor is 0 all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

DIVISORS = {
    "prices of options": (
        "def cdf(x):\n"
        "    return 0.5 * torch.erfc(-x / math.sqrt(2))\n"
        "def price(k, v):\n"
        "    return 100 * cdf(k / v) - 50 * cdf(k / v - v)\n"
        "def slope(k, v):\n"
        "    return 100 * torch.exp(-0.5 * (k / v) ** 2) / math.sqrt(2 * math.pi)\n"
        "@torch.no_grad()\n"
        "def solve(p, k, n=9):\n"
        "    v = torch.full_like(p, 0.3)\n"
        "    for _ in range(n):\n"
        "        miss = price(k, v) - p\n"
        "        v = v - miss / slope(k, v)\n"
        "        v = v.clamp(0.05, 2.0)\n"
        "    return v\n"
        "k = torch.tensor([0.1, 0.2, 6.0])\n"
        "print(solve(price(k, torch.full((3,), 0.31)), k).sum())\n",
        "slope(k, v).clamp(min=1e-6) if it is positive, or leave `v` as it is where the divisor is "
        "0: so is `miss`, a root",
    ),
    "the bound around the step": (
        "x, y = torch.tensor([0.4, 9.0]), torch.tensor([-0.5, -1.0])\n"
        "for _ in range(5):\n"
        "    x = torch.clamp(x - (torch.erf(x) + y) / torch.exp(-12 * x ** 2).mul(2), 0, 4)\n"
        "print(x.sum())\n",
        "leave `x` as it is where the divisor is 0 (advice)",
    ),
    "a step with a name, and a bound in place": (
        "def density(x):\n"
        "    return torch.exp(-12 * x * x)\n"
        "x, y = torch.tensor([0.4, 9.0]), torch.tensor([-0.5, -1.0])\n"
        "for _ in range(5):\n"
        "    step = (torch.erf(x) + y) / density(x)\n"
        "    x = x - step\n"
        "    x.clamp_(0, 4)\n"
        "print(x.sum())\n",
        "density(x).clamp(min=1e-6) if it is positive, or leave `x`",
    ),
    "a root that is reached": (
        "def root(a, x):\n"
        "    for _ in range(5):\n"
        "        x = x - (x ** 2 - a) / (2 * x)\n"
        "    return x\n"
        "print(root(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])).sum())\n",
        "(2 * x).clamp(min=1e-6) if it is positive, or leave `x` as it is where the divisor is 0: "
        "so is `x ** 2 - a`, a root",
    ),
    "a method of a class": (
        "class Solver:\n"
        "    def df(self, z):\n"
        "        return torch.exp(-z) * 2\n"
        "    def run(self, z, goal):\n"
        "        i = 0\n"
        "        while i < 4:\n"
        "            miss = -2 * torch.exp(-z) - goal\n"
        "            z = torch.minimum(z - miss / self.df(z), torch.tensor(200.0))\n"
        "            i += 1\n"
        "        return z\n"
        "print(Solver().run(torch.tensor([1.0, 150.0]), torch.tensor([-0.5, -0.1])).sum())\n",
        "self.df(z).clamp(min=1e-6) if it is positive, or leave `z`",
    ),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_the_divisor_is_bounded(run_here: RunHere, name: str) -> None:
    """The variable is bounded already, or nothing is left to correct."""
    text, fix = DIVISORS[name]
    err = run_here(HEAD + text).err
    assert "div made" in err.splitlines()[0], err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert "bound the divisor of this Newton step" in first, err
    assert fix in first, err
    assert "logsumexp" not in err


OTHERS = {
    "a gradient by its mean square": (
        "x, a = torch.zeros(4), torch.rand(4)\n"
        "for _ in range(3):\n"
        "    g = 2 * x * a\n"
        "    x = (x - g / (g ** 2).mean()).clamp(-1, 1)\n"
        "print(x.sum())\n",
        "",
    ),
    "weights that are normalised": (
        "w, e = torch.ones(4) / 4, torch.full((4,), 300.0)\n"
        "for _ in range(3):\n"
        "    k = torch.exp(-e)\n"
        "    w = w - w * k / k.sum()\n"
        "    w = w.clamp(0, 1)\n"
        "print(w.sum())\n",
        "exp",
    ),
    "a step by the length of a gradient": (
        "x = torch.zeros(3)\n"
        "for _ in range(3):\n"
        "    g = 2 * x\n"
        "    x = (x - g / g.norm()).clamp(-1, 1)\n"
        "print(x.sum())\n",
        "add an eps to the norm",
    ),
    "a share of what is bounded": (
        "x = torch.tensor([-1.0, -2.0])\n"
        "for _ in range(3):\n"
        "    x = x.clamp(0, 1)\n"
        "    x = x / x.sum()\n"
        "print(x.sum())\n",
        "",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_divisions(run_here: RunHere, name: str) -> None:
    text, fix = OTHERS[name]
    err = run_here(HEAD + text).err
    assert "div made" in err.splitlines()[0], err
    assert fix in next(line for line in err.splitlines() if "fix: " in line), err
    assert "Newton" not in err
