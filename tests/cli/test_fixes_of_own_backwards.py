"""What ``fxguard run`` says of 0 / 0 in the backward of an autograd function of the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
TAIL = (
    "    @staticmethod\n"
    "    def backward(ctx, g):\n"
    "{backward}"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.fc = nn.Linear(2, 2, bias=False)\n"
    "    def forward(self, z):\n"
    "        return Own.apply(self.fc(z)) * 2\n"
    "net = Net()\n"
    "net(torch.tensor([[0.0, 0.0], [1.0, 2.0]])).sum().backward()\n"
    "print(net.fc.weight.grad.sum().item())\n"
)


def script(forward: str, backward: str) -> str:
    begin = "class Own(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
    return HEAD + begin + forward + TAIL.format(backward=backward)


LIMITS = {
    "an activation's gate": (
        script(
            "        out = x.sigmoid() * x\n        ctx.save_for_backward(out, x)\n"
            "        return out\n",
            "        out, x = ctx.saved_tensors\n        gate = out / x\n"
            "        return g * gate * (1 + x - out)\n",
        ),
        "take x.sigmoid() in place of `out / x`: `out` is made as `x.sigmoid() * x` (script.py:7)",
    ),
    "a gate of two functions": (
        script(
            "        y = x * torch.tanh(F.softplus(x))\n        ctx.save_for_backward(x, y)\n"
            "        return y\n",
            "        (x, y) = ctx.saved_tensors\n        t = y / x\n"
            "        return g * (t + x * torch.sigmoid(x) * (1 - t * t))\n",
        ),
        "take torch.tanh(F.softplus(x)) in place of `y / x`",
    ),
    "a cardinal sine": (
        script(
            "        y = torch.where(x == 0, 1.0, torch.sin(x) / x)\n"
            "        ctx.save_for_backward(x, y)\n        return y\n",
            "        x, y = ctx.saved_tensors\n        return g * (torch.cos(x) - y) / x\n",
        ),
        "take 0, the limit of `g * (torch.cos(x) - y) / x`, where x is 0, by torch.where(x == 0, 0",
    ),
    "a derivative by the rule for quotients": (
        script(
            "        y = torch.where(x == 0, torch.ones_like(x), torch.expm1(x) / x)\n"
            "        ctx.save_for_backward(x)\n        return y\n",
            "        (x,) = ctx.saved_tensors\n        top = x * torch.exp(x) - torch.expm1(x)\n"
            "        slope = top / x ** 2\n        return g * slope\n",
        ),
        "take 0.5, the limit of `top / x ** 2`, where x is 0",
    ),
    "kept as an attribute": (
        script(
            "        ctx.angle = x\n        return x - torch.sin(x)\n",
            "        a = ctx.angle\n        part = (a - a.sin()) / a.pow(3)\n"
            "        return g * part * a ** 2 * 3\n",
        ),
        "take 1 / 6, the limit of `(a - a.sin()) / a.pow(3)`, where ctx.angle is 0",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_named(run_here: RunHere, name: str) -> None:
    text, fix = LIMITS[name]
    err = run_here(text).err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert "0 / 0" in err.splitlines()[0], err
    assert fix in first, err
    assert len(first) <= 175, err


def test_a_function_of_no_module(run_here: RunHere) -> None:
    text, fix = LIMITS["an activation's gate"]
    text = text.replace("net(torch.tensor", "Own.apply(net.fc.weight[0, 0] * torch.tensor")
    err = run_here(text).err
    assert fix in next(line for line in err.splitlines() if "fix: " in line), err


OTHERS = {
    "the length of a vector": script(
        "        n = (x * 0).norm()\n        ctx.save_for_backward(x * 0, n)\n        return n\n",
        "        x, n = ctx.saved_tensors\n        return g * x / n\n",
    ),
    "a quotient of two losses": script(
        "        ctx.save_for_backward(x.relu(), (-x).relu())\n        return x.abs()\n",
        "        up, down = ctx.saved_tensors\n        return g * up / (up + down)\n",
    ),
    "a root": script(
        "        y = x.abs().sqrt()\n        ctx.save_for_backward(x, y)\n        return y\n",
        "        x, y = ctx.saved_tensors\n        return g * x.sign() * y / (2 * x.abs())\n",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_quotient_without_a_limit(run_here: RunHere, name: str) -> None:
    err = run_here(OTHERS[name]).err
    assert "0 / 0" in err.splitlines()[0], err
    assert "the limit" not in err
    assert "in place of `" not in err
