"""What ``fxguard run`` says of steps that are too long: to a boundary, and of explicit schemes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

BOUNDARIES = {
    "a barrier": (
        "class Barrier:\n"
        "    def longest(self, z, d):\n"
        "        falling = d < 0\n"
        "        return torch.min(-z[falling] / d[falling])\n"
        "    def solve(self, z):\n"
        "        for _ in range(3):\n"
        "            d = torch.tensor([-1.0, 0.5])\n"
        "            a = self.longest(z, d)\n"
        "            z = z + a * d\n"
        "            cost = -torch.log(z).sum()\n"
        "        return cost\n"
        "print(Barrier().solve(torch.tensor([1.0, 2.0])))\n",
        "take 0.99 of the least ratio (script.py:7): `a` goes the whole way to the boundary, where "
        "an element of `z` is 0 (script.py:12)",
    ),
    "a number of Python": (
        "def inverse(w):\n"
        "    return 1 / w\n"
        "w, dw = torch.tensor([2.0, 1.0]), torch.tensor([-2.0, 0.0])\n"
        "k = 0\n"
        "while k < 3:\n"
        "    length = min(2.0, float((-w / dw)[dw < 0].min()))\n"
        "    w += length * dw\n"
        "    q = inverse(w)\n"
        "    k += 1\n"
        "print(q.sum())\n",
        "take 0.99 of the least ratio (script.py:9): `length` goes the whole way",
    ),
    "two variables": (
        "def room(z, dz):\n"
        "    ratios = torch.where(dz < 0, -z / dz, torch.inf)\n"
        "    return torch.clamp(ratios.amin(), max=1.0)\n"
        "def scaled(primal, slack):\n"
        "    return primal / slack\n"
        "x, s = torch.ones(3), torch.ones(3)\n"
        "dx, ds = torch.full((3,), 0.1), torch.tensor([-1.0, 0.0, 1.0])\n"
        "for it in range(3):\n"
        "    d = scaled(x, s)\n"
        "    ap, ad = room(x, dx), room(s, ds)\n"
        "    x = torch.clamp(x + ap * dx, min=0)\n"
        "    s = torch.relu(s + ad * ds)\n"
        "print(d.sum())\n",
        "take 0.99 of the least ratio (script.py:5): `ad` goes the whole way to the boundary, "
        "where an element of `s` is 0 (script.py:15)",
    ),
}
EXPLICIT = {
    "a decay": (
        "k, dt = torch.tensor([0.5, 3.0]), 0.5\n"
        "y = torch.ones(2)\n"
        "for _ in range(3):\n"
        "    y = y - dt * k * y\n"
        "    entropy = torch.log(y)\n"
        "print(entropy.sum())\n",
        "take smaller steps: keep `dt * k` below 1 (script.py:7), above which a step takes `y` "
        "below 0; or multiply by exp(-dt * k)",
    ),
    "prey and predators": (
        "def advance(x, y, h):\n"
        "    return x + h * (1.1 * x - 0.4 * x * y)\n"
        "def length(x):\n"
        "    return torch.sqrt(x)\n"
        "h, y = 0.6, torch.tensor([1.0, 9.0])\n"
        "x = torch.ones(2)\n"
        "for _ in range(3):\n"
        "    x = advance(x, y, h)\n"
        "    r = length(x)\n"
        "print(r.sum())\n",
        "take smaller steps `h` (script.py:8): `x` changes in proportion to itself (script.py:5), "
        "and only a step that is too long takes it below 0",
    ),
    "diffusion": (
        "D, dt = 1.0, 0.8\n"
        "u = torch.zeros(32)\n"
        "u[16] = 1.0\n"
        "def lap(v):\n"
        "    return torch.roll(v, 1) - 2 * v + torch.roll(v, -1)\n"
        "for _ in range(20):\n"
        "    u = u + dt * D * lap(u)\n"
        "    width = u.sqrt()\n"
        "print(width.sum())\n",
        "take smaller steps `dt` (script.py:4) if `u` has to stay positive: the explicit step "
        "(script.py:10)",
    ),
    "shallow water": (
        "class Water:\n"
        "    def __init__(self, n):\n"
        "        self.dx = 1.0 / n\n"
        "        self.h = torch.ones(n) + (torch.arange(n) < n // 2)\n"
        "        self.q = torch.zeros(n)\n"
        "    def step(self):\n"
        "        top = (self.q / self.h).abs().max() + 1e-3\n"
        "        dt = min(0.02, float(0.5 * self.dx / top))\n"
        "        c = torch.sqrt(9.81 * self.h)\n"
        "        F = torch.stack([self.q, self.q ** 2 / self.h + 4.905 * self.h ** 2])\n"
        "        a = (self.q / self.h).abs() + c\n"
        "        a = torch.maximum(a[1:], a[:-1])\n"
        "        U = torch.stack([self.h, self.q])\n"
        "        f = 0.5 * (F[:, 1:] + F[:, :-1]) - 0.5 * a * (U[:, 1:] - U[:, :-1])\n"
        "        self.h[1:-1] -= dt / self.dx * (f[0, 1:] - f[0, :-1])\n"
        "        self.q[1:-1] -= dt / self.dx * (f[1, 1:] - f[1, :-1])\n"
        "w = Water(50)\n"
        "for _ in range(60):\n"
        "    w.step()\n"
        "print(w.h.sum())\n",
        "so `top` (script.py:10) has to be the fastest wave's",
    ),
}
CUTS = {
    "a projected gradient": (
        "a = torch.tensor([1.0, 4.0])\n"
        "x = torch.ones(2)\n"
        "for _ in range(5):\n"
        "    g = a - 1 / x\n"
        "    x = (x - 0.9 * g).clamp(min=0)\n"
        "print(x.sum())\n",
        "keep `x` above 0 in this update, by clamp(min=1e-6) in place of clamp (script.py:8)",
    ),
    "weights of a mixture": (
        "def project(w, grad, lr):\n"
        "    return torch.relu(w - lr * grad)\n"
        "w = torch.full((3,), 0.3)\n"
        "for _ in range(4):\n"
        "    h = torch.log(w).sum()\n"
        "    w = project(w, torch.tensor([1.0, 0.0, -1.0]), 0.2)\n"
        "print(h)\n",
        "keep `w` above 0 in this update, by clamp(min=1e-6) in place of relu (script.py:5)",
    ),
}


@pytest.mark.parametrize("name", [*BOUNDARIES, *EXPLICIT, *CUTS])
def test_the_step_is_named(run_here: RunHere, name: str) -> None:
    text, fix = {**BOUNDARIES, **EXPLICIT, **CUTS}[name]
    err = run_here(HEAD + text).err
    first = next((line for line in err.splitlines() if "fix: " in line), "")
    assert fix in first, err
    assert len(first) <= 175, err


OTHERS = {
    "a body that falls": (
        "y, v, dt = torch.tensor(1.0), torch.tensor(0.0), 0.1\n"
        "for _ in range(9):\n"
        "    v = v - dt * 9.81\n"
        "    y = y + dt * v\n"
        "    t = torch.sqrt(2 * y)\n"
        "print(t)\n"
    ),
    "a pendulum": (
        "x, v, dt = torch.tensor(1.0), torch.tensor(0.0), 0.1\n"
        "for _ in range(30):\n"
        "    v = v - dt * x\n"
        "    x = x + dt * v\n"
        "    t = torch.log(x)\n"
        "print(t)\n"
    ),
    "99 of a hundred": (
        "z, d = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, -0.0])\n"
        "for _ in range(3):\n"
        "    a = 0.99 * (-z[:1] / d[:1]).min()\n"
        "    z = z + a * d\n"
        "    cost = torch.log(z)\n"
        "print(cost.sum())\n"
    ),
    "a layer that is cut": (
        "net = nn.Linear(2, 3)\n"
        "for _ in range(2):\n"
        "    h = torch.relu(net(torch.ones(2)) - 9)\n"
        "    loss = (1 / h).sum()\n"
        "    loss.backward()\n"
        "print(loss.item())\n"
    ),
    "data that are negative": (
        "u, dt = torch.tensor([1.0, -2.0]), 0.1\n"
        "for _ in range(3):\n"
        "    r = torch.sqrt(u)\n"
        "    s = r + dt * torch.roll(r, 1)\n"
        "print(s.sum())\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHERS[name]).err
    assert "made" in err.splitlines()[0], err
    assert "smaller steps" not in err
    assert "the boundary" not in err
    assert "in this update" not in err
