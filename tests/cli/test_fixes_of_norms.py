"""Quotients by a norm that is 0, where no derivative is taken: factors that clip or normalise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
BOUND = "bound the factor, as clipping does, {}.clamp(max=1)"
EPS = "add an eps to the norm, {} + 1e-6"
ZERO = ": a norm is 0, and its factor infinite (advice)"
ROWS = "g = torch.tensor([[0.0, 0.0], [3.0, 4.0]])\n"

FACTORS = {
    "gradients of each sample": (
        "from torch.func import grad, vmap\n"
        "def loss(p, x):\n    return torch.relu(1 - x @ p['w'] - p['b'])\n"
        "def global_norm(grads):\n"
        "    sq = [g.reshape(len(g), -1).pow(2).sum(1) for g in grads.values()]\n"
        "    return torch.stack(sq).sum(0).sqrt()\n"
        "p, x = {'w': torch.ones(2), 'b': torch.zeros(())}, torch.tensor([[5.0, 5.0], [0, 0]])\n"
        "radius, grads = 1.0, vmap(grad(loss), (None, 0))(p, x)\n"
        "factor = radius / global_norm(grads)\n"
        "for name, g in grads.items():\n"
        "    g = g * factor.view(-1, *[1] * (g.dim() - 1))\n    print(g.sum(0))\n",
        BOUND.format("(radius / global_norm(grads))")
        + ", or "
        + EPS.format("global_norm(grads)")
        + ZERO,
    ),
    "rows that are clipped": (
        ROWS + "max_norm, n = 1.0, g.pow(2).sum(1).sqrt()\nscale = max_norm / n\n"
        "g = g * scale[:, None]\nprint(g)\n",
        BOUND.format("(max_norm / n)") + ", or " + EPS.format("n") + ZERO,
    ),
    "rows of one length": (
        ROWS + "n = torch.linalg.norm(g, dim=1)\ng = g * (1.0 / n)[:, None]\nprint(g)\n",
        EPS.format("n") + ", or " + BOUND.format("(1.0 / n)") + ZERO,
    ),
    "a ratio of trust": (
        "w, g = torch.randn(3), torch.zeros(3)\ntrust = w.norm() / g.norm()\ng = g * trust\n"
        "print(w - 0.1 * g)\n",
        BOUND.format("(w.norm() / g.norm())") + ", or " + EPS.format("g.norm()") + ZERO,
    ),
    "a gradient that flows": (
        "x = torch.zeros(2, 3, requires_grad=True)\nn = (x * 1).pow(2).sum(1, True).sqrt()\n"
        "y = x * (1.0 / n)\ny.sum().backward()\n",
        "add an eps inside the root, sqrt(s + 1e-12): at 0 the root has no derivative",
    ),
    "a gradient in a model": (
        "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(3, 3)\n        torch.nn.init.zeros_(self.l.weight)\n"
        "        torch.nn.init.zeros_(self.l.bias)\n"
        "    def forward(self, x):\n        h = self.l(x)\n"
        "        n = h.pow(2).sum(1, keepdim=True).sqrt()\n        return h * (2.0 / n)\n"
        "M()(torch.randn(2, 3)).sum().backward()\n",
        "add an eps inside the root, sqrt(s + 1e-12): at 0 the root has no derivative",
    ),
    "a quotient of something else": (
        ROWS + "y, n = torch.randn(2), g.pow(2).sum(1).sqrt()\ninv = y / n\nprint(inv.sum())\n",
        "choose the divisor by where(n == 0, 1, n) before the division, or add an eps to it",
    ),
    "a norm that divides something else": (
        ROWS + "y, n = torch.randn(2), g.norm(dim=1)\ninv = y / n\nprint(inv.sum())\n",
        EPS.format("n") + ": a norm is 0",
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_norm_is_0(run_here: RunHere, name: str) -> None:
    """The factor is bounded where the vectors are multiplied by it and nothing differentiates."""
    text, fix = FACTORS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err
