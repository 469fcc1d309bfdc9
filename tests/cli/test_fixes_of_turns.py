"""What ``fxguard run`` says of a loop whose steps are too large, or that begins with too much."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ntorch.manual_seed(0)\n"
PLANE = (
    "def lap(f):\n"
    "    p = F.pad(f[None], (1, 1, 1, 1), mode='replicate')[0]\n"
    "    return (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * f) / 0.25\n"
)

STEPS = {
    "a step that a function bounds": (
        PLANE + "def largest(k):\n"
        "    return 0.25 / k\n"
        "@torch.no_grad()\n"
        "def solve(c, k, end):\n"
        "    n = int(end / largest(k)) + 1\n"
        "    tau = end / n\n"
        "    for _ in range(n):\n"
        "        c = c + tau * (k * lap(c) + 0.3 * c * (1 - c))\n"
        "    return c\n"
        "print(solve(torch.rand(8, 8), 8.0, 4.0).sum())\n",
        "`tau` (script.py:13, by `largest`, script.py:9), at most dx**2 / (4 * D) for diffusion "
        "of `c`: ",
    ),
    "a class with a step": (
        "class Heat:\n"
        "    def __init__(self):\n"
        "        self.dt = 0.8\n"
        "    def run(self, t):\n"
        "        for _ in range(90):\n"
        "            t = t + self.dt * (t.roll(1, 0) + t.roll(-1, 0) - 2 * t)\n"
        "        return t\n"
        "print(Heat().run(torch.rand(12)).pow(2).pow(4).sum())\n",
        "`self.dt` (script.py:10), at most dx**2 / (2 * D) for diffusion of `t`",
    ),
    "in place, three dimensions": (
        "u, h = torch.rand(4, 4, 4), 0.5\n"
        "i = 0\n"
        "while i < 200:\n"
        "    u += h * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1)\n"
        "              + u.roll(1, 2) + u.roll(-1, 2) - 6 * u)\n"
        "    i += 1\n"
        "print(u.sum())\n",
        "`h` (script.py:5), at most dx**2 / (6 * D) for diffusion of `u`",
    ),
    "a rate with a name, and a bound after it": (
        PLANE + "def go(u, n, dt):\n"
        "    for _ in range(n):\n"
        "        rate = 2 * lap(u)\n"
        "        u = u + dt * rate\n"
        "        u = torch.where(u == 7, 0, u)\n"
        "    return u\n"
        "print(go(torch.rand(6, 6), 60, 0.5).sum())\n",
        "`dt` (script.py:11), at most dx**2 / (4 * D) for diffusion of `u`",
    ),
    "a reaction alone": (
        "def rate(y):\n"
        "    return y * (y - 1)\n"
        "y, dt = 2 + torch.rand(5), 0.5\n"
        "for _ in range(40):\n"
        "    y = torch.add(y, rate(y) * dt)\n"
        "print(y.sum())\n",
        "`y` at script.py:9, such as by clamp",
    ),
    "another name at the end of a turn": (
        "y, dt = 2 + torch.rand(5), 0.5\n"
        "for _ in range(40):\n"
        "    new = y + dt * y ** 2\n"
        "    y = new\n"
        "print(y.sum())\n",
        "take smaller steps than `dt` (script.py:5), and more of them, or an implicit scheme",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_too_large(run_here: RunHere, name: str) -> None:
    """Where it is made, and how large it may be for diffusion."""
    text, fix = STEPS[name]
    err = run_here(HEAD + text).err
    assert "overflow" in err.splitlines()[0], err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert fix in first, err
    assert re.search("in its loop it (grew from|has become) [0-9]", first)


NO_DIFFUSION = {
    "a wave": (
        "u, v, dt = torch.rand(9), torch.zeros(9), 1.5\n"
        "for _ in range(200):\n"
        "    v = v + dt * (u.roll(1) + u.roll(-1) - 2 * u)\n"
        "    u = u + dt * v\n"
        "print(u.sum())\n"
    ),
    "a difference that is no Laplacian": (
        "u, dt = torch.rand(9), 1.5\n"
        "for _ in range(300):\n"
        "    u = u + dt * (u.roll(1) + u.roll(-1) - 3 * u)\n"
        "print(u.sum())\n"
    ),
    "diffusion of something else": (
        "w, y, dt = torch.rand(9), torch.rand(9), 1.5\n"
        "for _ in range(300):\n"
        "    y = y + dt * (y * 0.5 + w.roll(1) + w.roll(-1) - 2 * w)\n"
        "print(y.sum())\n"
    ),
}


@pytest.mark.parametrize("name", NO_DIFFUSION)
def test_no_bound_of_diffusion_elsewhere(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + NO_DIFFUSION[name]).err
    assert "overflow" in err.splitlines()[0], err
    assert "for diffusion of" not in err


CUBIC = (
    "    for _ in range(9):\n"
    "        s = x @ x.t()\n"
    "        x = 3.4 * x - 4.7 * s @ x + 2 * s @ s @ x\n"
)
WHOLE = {
    "the norm of each row": (
        "def orth(g):\n"
        "    x = g.t() if g.shape[0] > g.shape[1] else g\n"
        "    x = x / (x.norm(dim=1, keepdim=True) + 1e-7)\n" + CUBIC + "    return x\n"
        "print(orth(1 + torch.rand(6, 8)).sum())\n",
        "(script.py:7), not one over dim=1",
    ),
    "by normalize": (
        "def orth(g):\n"
        "    x = F.normalize(g, dim=-1)\n" + CUBIC + "    return x\n"
        "print(orth(1 + torch.rand(6, 8)).sum())\n",
        "(script.py:6), not one over dim=-1",
    ),
    "in place, and turned before the loop": (
        "def orth(x):\n"
        "    x /= torch.linalg.norm(x, dim=0)\n"
        "    if x.shape[0] > 5:\n"
        "        x = x.t()\n" + CUBIC + "    return x\n"
        "print(orth(1 + torch.rand(6, 8)).sum())\n",
        "(script.py:6), not one over dim=0",
    ),
    "by Newton and Schulz": (
        "z = torch.rand(8, 8) + 1\n"
        "z = z / z.norm(2, 1, True)\n"
        "for _ in range(30):\n"
        "    z = 1.5 * z - 0.5 * torch.matmul(torch.matmul(z, z.mT), z)\n"
        "print(z.sum())\n",
        "`z` by the norm of the whole matrix (script.py:6), not one over dim=1",
    ),
    "in an optimizer": (
        "class Own(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            x = p.grad / p.grad.norm(dim=1, keepdim=True)\n"
        "            for _ in range(12):\n"
        "                x = 2.5 * x - 1.5 * x @ x.t() @ x\n"
        "            p -= x\n"
        "net = nn.Linear(6, 6)\n"
        "opt = Own([net.weight])\n"
        "net(torch.rand(5, 6)).pow(2).sum().backward()\n"
        "opt.step()\n"
        "print(net.weight.sum().item())\n",
        "(script.py:11), not one over dim=1",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_norm_of_the_whole_matrix(run_here: RunHere, name: str) -> None:
    """A matrix that is multiplied with itself begins with a norm of 1."""
    text, fix = WHOLE[name]
    err = run_here(HEAD + text).err
    assert fix in next(line for line in err.splitlines() if "fix: " in line), err


OTHER_NORMS = {
    "that of the whole, times a number": (
        "x = torch.rand(5, 5)\n"
        "x = 4 * x / x.norm()\n"
        "for _ in range(30):\n"
        "    x = 1.5 * x - 0.5 * x @ x.t() @ x\n"
        "print(x.sum())\n"
    ),
    "of matrices of a batch": (
        "x = torch.rand(3, 5, 5)\n"
        "x = 4 * x / x.norm(dim=(-2, -1), keepdim=True)\n"
        "for _ in range(30):\n"
        "    x = 1.5 * x - 0.5 * x @ x.mT @ x\n"
        "print(x.sum())\n"
    ),
    "a graph of what is alike": (
        "x = F.normalize(torch.rand(6, 5), dim=1)\n"
        "for _ in range(60):\n"
        "    a = torch.relu(x @ x.t()).clamp(max=9)\n"
        "    x = x + 8 * a @ x\n"
        "print(x.sum())\n"
    ),
    "rows that a matrix multiplies": (
        "a = torch.rand(5, 5) * 9\n"
        "x = torch.rand(5, 5)\n"
        "x = x / x.norm(dim=1, keepdim=True)\n"
        "for _ in range(60):\n"
        "    x = x @ a\n"
        "print(x.sum())\n"
    ),
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_beginnings(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHER_NORMS[name]).err
    assert "overflow" in err.splitlines()[0], err
    assert "whole matrix" not in err


def test_the_numbers_are_those_of_the_variable(run_here: RunHere) -> None:
    """In one call of the function, and not those of a part of the line, or of a call before it."""
    err = run_here(
        HEAD + "def orth(x):\n"
        "    seen = [x]\n"
        "    for _ in range(5):\n"
        "        s = x @ x.t()\n"
        "        x = 3 * x + (2 * s + s @ s) @ x\n"
        "        seen.append(x)\n"
        "    print(*(f'{each.abs().max():.2g}' for each in seen))\n"
        "    return x\n"
        "orth(torch.rand(4, 4) * 1e-3)\n"
        "print(orth(torch.rand(4, 4)).sum())\n"
    )
    held = err.out.splitlines()[1].split()
    finite = [each for each in held if each not in ("inf", "nan")]
    first = next(line for line in err.err.splitlines() if "fix: " in line)
    assert f"it grew from {finite[0]} to {finite[-1]} in {len(finite) - 1} turns" in first


def test_one_overflow_in_a_sum_is_not_a_growth(run_here: RunHere) -> None:
    err = run_here(
        HEAD + "total = torch.ones(())\n"
        "for i in range(9):\n"
        "    total = total + torch.tensor(20.0 * i).exp()\n"
        "print(total.item())\n"
    ).err
    assert "exp made inf" in err, err
    assert "in its loop" not in err
