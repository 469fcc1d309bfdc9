"""What ``fxguard run`` says of a division by how much something has changed, where it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"

CHANGES = {
    "Barzilai and Borwein, in a class": (
        "class Steps:\n"
        "    prev = None\n"
        "    def length(self, x, g):\n"
        "        if self.prev is None:\n"
        "            step = torch.tensor(0.1)\n"
        "        else:\n"
        "            s = x - self.prev[0]\n"
        "            d = g - self.prev[1]\n"
        "            long = (s @ s) / (s @ d)\n"
        "            short = (s @ d) / (d @ d)\n"
        "            step = torch.sqrt((long * short).abs())\n"
        "        self.prev = (x.clone(), g.clone())\n"
        "        return step\n"
        "x, steps = torch.tensor([3.0, 4.0]), Steps()\n"
        "for _ in range(90):\n"
        "    g = 2 * x * (x.abs() > 1e-3)\n"
        "    x = x - steps.length(x, g) * g\n"
        "print(x.sum())\n",
        "stop where `d` (script.py:11) is 0 throughout, with `g` as it was before: script.py:12 "
        "and script.py:13 divide by a product with it; or guard both",
    ),
    "in a loop, by sums": (
        "x, old, g_old = torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)\n"
        "for _ in range(90):\n"
        "    g = x.clamp(-1, 1)\n"
        "    s = x - old\n"
        "    y = g - g_old\n"
        "    rate = (s * s).sum() / (s * y).sum()\n"
        "    old, g_old = x, g\n"
        "    x = x - 1e-3 * rate * g\n"
        "print(x.sum())\n",
        "stop where `y` (script.py:8) is 0 throughout, with `g` as it was before: script.py:9 "
        "divides by a product with it; or guard it",
    ),
    "two on one line": (
        "x, grad = torch.tensor([3.0, 4.0]), torch.ones(2)\n"
        "for _ in range(4):\n"
        "    x_new = (x - grad).clamp(min=0)\n"
        "    grad_new = x_new - 1\n"
        "    s, y = x_new - x, grad_new - grad\n"
        "    rate = ((s @ y) / (s @ s)).clamp(0.1, 9)\n"
        "    x, grad = x_new, 0 * grad_new\n"
        "print((rate * x).sum())\n",
        "stop where `s` (script.py:8) is 0 throughout, with `x_new` as it was before: script.py:9 "
        "divides by a product with it; or guard it",
    ),
    "an update of a curvature": (
        "def bfgs(h, x, g, last_x, last_g):\n"
        "    dx = x - last_x\n"
        "    dg = g - last_g\n"
        "    rho = 1.0 / torch.dot(dg, dx)\n"
        "    h = h + torch.outer(dx, dx) * rho\n"
        "    return h - torch.outer(h @ dg, h @ dg) / dg.dot(h @ dg)\n"
        "x = torch.tensor([3.0, 4.0])\n"
        "print(bfgs(torch.eye(2), x, 2 * x, x.clone(), 2 * x.clone()).sum())\n",
        "script.py:7 and script.py:9 divide by a product with it; or guard both",
    ),
    "a product with a name": (
        "x, g_prev, x_prev = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2)\n"
        "for _ in range(4):\n"
        "    grad = torch.ones(2)\n"
        "    delta = grad - g_prev\n"
        "    curve = (delta ** 2).sum()\n"
        "    step = torch.div(torch.ones(()), curve)\n"
        "    g_prev.copy_(grad)\n"
        "    x = x - step * grad\n"
        "print(x.sum())\n",
        "stop where `delta` (script.py:7) is 0 throughout, with `grad` as it was before: "
        "script.py:9 divides by a product with it",
    ),
    "a secant": (
        "def f(x):\n"
        "    return x ** 2 - 2\n"
        "a, b = torch.tensor(1.0), torch.tensor(2.0)\n"
        "fa, fb = f(a), f(b)\n"
        "for _ in range(20):\n"
        "    new = b - fb * (b - a) / (fb - fa)\n"
        "    a, fa = b, fb\n"
        "    b, fb = new, f(new)\n"
        "print(b)\n",
        "stop where `fb - fa` is 0 throughout, with `fb` as it was before: script.py:9 divides by "
        "it; ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_zero(run_here: RunHere, name: str) -> None:
    """It is named, and all that divide by it are."""
    text, fix = CHANGES[name]
    err = run_here(HEAD + text).err
    assert "div made" in err.splitlines()[0], err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert fix in first, err


OTHERS = {
    "a feature that is constant": (
        "x, y = torch.full((5,), 3.0), torch.rand(5)\nd = x - x.mean()\nprint((d @ y) / (d @ d))\n"
    ),
    "two points that are one": (
        "def unit(a, b):\n"
        "    d = a - b\n"
        "    return d / d.norm()\n"
        "print(unit(torch.ones(3), torch.ones(3)).sum())\n"
    ),
    "one row of a change": (
        "x, x_old = torch.rand(3, 2), torch.zeros(3, 2)\n"
        "for _ in range(2):\n"
        "    s = x - x_old\n"
        "    rate = 1 / (s * s).sum(1)\n"
        "    x_old = x.clone()\n"
        "    x = x + torch.tensor([[1.0], [0.0], [1.0]])\n"
        "print(rate.sum())\n"
    ),
    "a vector of zeros": ("u, v = torch.zeros(3), torch.rand(3)\nprint((u @ v) / (u @ u))\n"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_zeros(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + OTHERS[name]).err
    assert "div made" in err.splitlines()[0] or "reciprocal made" in err.splitlines()[0], err
    assert "as it was before" not in err


GRADIENTS = (
    "def solve(A, b):\n    x, r, p = torch.zeros_like(b), b.clone(), b.clone()\n"
    "    rs = r @ r\n    for _ in range({}):\n        Ap = A @ p\n        {}\n"
    "        x, r = x + alpha * p, r - alpha * Ap\n        rs_new = r @ r\n"
    "        p = r + (rs_new / rs) * p\n        rs = rs_new\n    return x\n"
    "print(solve(torch.eye(3), {}).sum().item())\n"
)
LEAVE = (
    "leave the loop once `rs` is 0, or far below what it began with: it has converged there, and "
    "script.py:13 divides by it, too"
)


@pytest.mark.parametrize(
    ("turns", "alpha", "b"),
    [
        (5, "alpha = rs / (p @ Ap)", "torch.zeros(3)"),
        (5, "alpha = rs / torch.dot(p, Ap)", "torch.ones(3)"),
        (5, "alpha = torch.div(rs, p @ Ap)", "torch.tensor([1.0, 0, 2])"),
    ],
)
def test_a_residual_of_conjugate_gradients(
    run_here: RunHere, turns: int, alpha: str, b: str
) -> None:
    """Who guards one of the two quotients divides by 0 in the other one."""
    expect_first(run_here, GRADIENTS.format(turns, alpha, b), LEAVE)


def test_a_dividend_by_which_nothing_else_divides(run_here: RunHere) -> None:
    text = (
        "def steps(x, g):\n    for _ in range(3):\n        rs = g @ g\n"
        "        x = x - (rs / (g @ (2 * g))) * g\n        g = 0 * g\n    return x\n"
        "print(steps(torch.ones(3), torch.ones(3)).sum().item())\n"
    )
    expect_not_said(run_here, text, "leave the loop")
