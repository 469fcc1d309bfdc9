"""What ``fxguard run`` proposes where a loop computes a number from itself, and it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

GROW = {
    "steps that are too large": (
        "def lap(u):\n"
        "    return torch.roll(u, 1) - 2 * u + torch.roll(u, -1)\n"
        "u, dt = torch.rand(16), 0.9\n"
        "for _ in range(300):\n"
        "    rate = lap(u)\n"
        "    u = u + dt * rate\n"
        "print(u.pow(2).sum().item())\n",
        "take smaller steps than `dt` (script.py:6), at most dx**2 / (2 * D) for diffusion of `u`",
    ),
    "steps of the inner part alone, padded": (
        "u, dt = torch.rand(16), 0.9\n"
        "for _ in range(300):\n"
        "    flux = (u[1:] - u[:-1]) / 0.8\n"
        "    inner = u[1:-1] + dt * ((flux[1:] - flux[:-1]) / 0.8)\n"
        "    u = torch.nn.functional.pad(inner, (1, 1))\n"
        "print(u.pow(2).sum().item())\n",
        "take smaller steps than `dt` (script.py:4), and more of them, or an implicit scheme",
    ),
    "steps by a method": (
        "h, y = 0.5, torch.rand(4)\n"
        "for _ in range(300):\n"
        "    y = y.add(y.square() + y, alpha=h)\n"
        "print(y.sum().item())\n",
        "take smaller steps than `h` (script.py:4), and more of them",
    ),
    "a matrix": (
        "A, v = torch.rand(4, 4) * 4, torch.rand(4)\n"
        "for _ in range(100):\n"
        "    v = A @ v\n"
        "print(v.sum().item())\n",
        "keep the norm of `A`, which multiplies `v` (script.py:6), below 1",
    ),
    "a matrix in a model": (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.rand(4, 4) * 4)\n"
        "    def forward(self, h):\n"
        "        for _ in range(100):\n"
        "            h = torch.relu(torch.matmul(h, self.w.t()) + 1)\n"
        "        return h\n"
        "Net()(torch.rand(2, 4)).sum().backward()\n",
        "keep the norm of `self.w`, which multiplies `h` (script.py:10), below 1",
    ),
    "a number": (
        "x, r = torch.rand(4), 3.0\n"
        "for _ in range(100):\n"
        "    x = r * x + 1\n"
        "print(x.sum().item())\n",
        "keep `r`, which multiplies `x` (script.py:6), between -1 and 1",
    ),
    "an iteration that needs a small beginning": (
        "g = torch.rand(4, 4) * 3\n"
        "x = g * 2\n"
        "for _ in range(40):\n"
        "    gram = x @ x.t()\n"
        "    x = 1.5 * x - 0.5 * gram @ x\n"
        "print(x.sum().item())\n",
        "begin the loop with a smaller `x`, such as by its norm (script.py:5)",
    ),
    "a function of the script that squares": (
        "def features(z):\n"
        "    return torch.cat([z, z * z], -1)\n"
        "z, coef = torch.rand(4, 3) * 4, torch.rand(6, 3)\n"
        "for _ in range(20):\n"
        "    z = features(z) @ coef\n"
        "print(z.sum().item())\n",
        "bound `z` at script.py:8, such as by clamp or tanh, or begin the loop with a smaller `z`",
    ),
}


@pytest.mark.parametrize("name", GROW)
def test_what_lets_it_grow_is_named(run_here: RunHere, name: str) -> None:
    """A step, a factor, or what the loop begins with."""
    text, fix = GROW[name]
    err = run_here(HEAD + text).err
    assert "overflow" in err.splitlines()[0], err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert fix in first, err
    assert "in its loop it" in first


def test_a_step_of_an_optimizer(run_here: RunHere) -> None:
    """Its operations ran again alone."""
    err = run_here(
        HEAD + "class Own(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            x = p.grad * 1e3\n"
        "            for _ in range(9):\n"
        "                x = 2 * x - x @ x.t() @ x\n"
        "            p -= x\n"
        "net = nn.Linear(3, 3)\n"
        "opt = Own(net.parameters())\n"
        "opt = Own([net.weight])\n"
        "net(torch.rand(5, 3)).pow(2).sum().backward()\n"
        "opt.step()\n"
        "print(net.weight.sum().item())\n"
    ).err
    assert "begin the loop with a smaller `x`, such as by its norm (script.py:10)" in err, err


OTHERS = {
    "layers, each with weights of its own": (
        "layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = layers\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "        return x.exp()\n"
        "Net()(torch.full((2, 4), 1e5)).sum().backward()\n"
    ),
    "one overflow in a loop that sums": (
        "total = torch.zeros(())\n"
        "for i in range(5):\n"
        "    total = total + torch.tensor(60.0 * i).exp()\n"
        "print(total.item())\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_not_grown_in_turns_is_another_case(run_here: RunHere, name: str) -> None:
    """A loop is around it, and is not to blame."""
    err = run_here(HEAD + OTHERS[name]).err
    assert "made inf" in err, err
    assert "in its loop" not in err


NEWTON = {
    "a root": (
        "y, x = torch.tensor([0.5, 2.0]), torch.tensor([0.3, 0.0])\n"
        "for _ in range(20):\n"
        "    f = x ** 2 - y\n"
        "    x = x - f / (2 * x)\n"
        "print(x.sum().item())\n",
        "keep `x` in a range at each step of Newton's method (script.py:7)",
    ),
    "a step with a name": (
        "def density(x):\n"
        "    return torch.exp(-x ** 2 / 2)\n"
        "x = torch.full((3,), 3.0)\n"
        "for _ in range(12):\n"
        "    miss = torch.erf(x) - 0.1\n"
        "    step = miss / density(x)\n"
        "    x = x - step\n"
        "print(x.sum().item())\n",
        "keep `x` in a range at each step of Newton's method (script.py:10)",
    ),
    "in place, in a function": (
        "def solve(target, n):\n"
        "    rate = torch.full_like(target, 40.0)\n"
        "    for _ in range(n):\n"
        "        value = torch.exp(-rate * 3)\n"
        "        slope = -3 * torch.exp(-rate * 3)\n"
        "        rate -= (value - target) / slope\n"
        "    return rate\n"
        "print(solve(torch.tensor([0.9, 0.5]), 8).sum().item())\n",
        "keep `rate` in a range at each step of Newton's method (script.py:9)",
    ),
}


@pytest.mark.parametrize("name", NEWTON)
def test_a_step_that_overshoots(run_here: RunHere, name: str) -> None:
    text, fix = NEWTON[name]
    err = run_here(HEAD + text).err
    assert "div made" in err.splitlines()[0], err
    assert fix in next(line for line in err.splitlines() if "fix: " in line), err


NO_STEPS = {
    "a vector of length one": (
        "a, v = torch.zeros(3, 3), torch.rand(3)\n"
        "for _ in range(5):\n"
        "    v = a @ v\n"
        "    v = v / v.norm()\n"
        "print(v.sum().item())\n"
    ),
    "a gradient of length one": (
        "x = torch.zeros(3)\n"
        "for _ in range(5):\n"
        "    g = 2 * x\n"
        "    x = x - g / g.norm()\n"
        "print(x.sum().item())\n"
    ),
    "no loop": "x = torch.zeros(3)\nx = x - (x - x) / (2 * x)\nprint(x.sum().item())\n",
    "another's divisor": (
        "x, w = torch.rand(3), torch.zeros(3)\n"
        "for _ in range(5):\n"
        "    x = x - x.sum() / w\n"
        "print(x.sum().item())\n"
    ),
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_other_divisions_in_loops(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + NO_STEPS[name]).err
    assert "div made" in err.splitlines()[0], err
    assert "Newton" not in err
