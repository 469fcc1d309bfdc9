"""A parameter or a layer's result that left the range in which an operation has a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

MODEL = (
    f"{IMPORTS}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.rho, self.layer = nn.Parameter(torch.tensor({0})), nn.Linear(3, 4)\n"
    "    def forward(self, x):\n        rho = self.rho\n{1}"
    "net = Net()\nopt = torch.optim.SGD(net.parameters(), 0.1)\nfor _ in range(3):\n"
    "    opt.zero_grad()\n    net(torch.ones(2, 3)).mean().backward()\n    opt.step()\n"
    "    net.rho.data += 0.4\n"
)
SCRIPT = (
    f"{IMPORTS}r = torch.tensor([0.2, {{0}}], requires_grad=True)\n"
    "opt = torch.optim.Adam([r], 0.3)\nfor _ in range(3):\n    opt.zero_grad()\n"
    "    loss = {1}\n    (-loss.mean()).backward()\n    opt.step()\n"
)
TANH = "make it as tanh(raw), or sigmoid(raw) if it is never negative, or clamp it after each step"

TOLD = {
    "a correlation": (
        MODEL.format(0.8, "        return x * (1 - rho ** 2).sqrt()\n"),
        f"keep the learned `rho` inside (-1, 1): {TANH} of the optimizer, under no_grad",
    ),
    "on several lines": (
        MODEL.format(
            0.8, "        a = 1 - rho\n        b = 1 + self.rho\n        return x * (a * b).log()\n"
        ),
        "keep the learned `rho` inside (-1, 1)",
    ),
    "a Poisson ratio": (
        MODEL.format(0.4, "        return x * torch.sqrt(1 - 2 * rho)\n"),
        "keep the learned `rho` below 0.5: make it as 0.5 - softplus(raw), or clamp it",
    ),
    "a probability": (
        SCRIPT.format(0.9, "torch.log(1 - r * r)").replace("-loss", "loss"),
        f"keep the learned `r` inside (-1, 1): {TANH}",
    ),
    "a logit": (
        MODEL.format(0.9, "        return x * torch.logit(rho)\n"),
        "keep the learned `rho` inside (0, 1): make it as sigmoid(raw), or clamp it",
    ),
    "of a layer": (
        MODEL.format(
            0.8,
            "        mu, rho = (self.layer(x) * 9).chunk(2, -1)\n"
            "        return mu * torch.sqrt(1 - rho.square())\n",
        ),
        "keep `rho`, which chunk (script.py:11) makes, inside (-1, 1): make it as tanh(raw), or "
        "sigmoid(raw) if it is never negative; a bound on",
    ),
    "an arc": (
        SCRIPT.format(0.9, "torch.acos(2 * r - 1)"),
        "keep the learned `r` inside (0, 1): make it as sigmoid(raw)",
    ),
}

TWINS = {
    "a scale": MODEL.format(-0.8, "        return x * rho.log()\n"),
    "data": f"{IMPORTS}x = torch.tensor([0.3, 1.2])\nprint((1 - x * x).sqrt().sum())\n",
    "two parameters": (
        f"{IMPORTS}a, b = (torch.tensor(x, requires_grad=True) for x in (1.2, 0.5))\n"
        "(1 - a * a - b * b).sqrt().backward()\n"
    ),
    "a cosine": (
        f"{IMPORTS}x = torch.randn(9, 3, requires_grad=True)\nc = (x * x).sum(-1)\n"
        "(1 - c * c).sqrt().mean().backward()\n"
    ),
    "what a model returns": MODEL.format(0.1, "        return self.layer(x) * 9\n").replace(
        "net(torch.ones(2, 3)).mean()", "(1 - 2 * net(torch.ones(2, 3))).sqrt().mean()"
    ),
    "on either side": MODEL.format(-0.8, "        return x * torch.sqrt(rho * rho - 1)\n"),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_range_is_named(run_here: RunHere, name: str) -> None:
    text, told = TOLD[name]
    assert told in run_here(text).fixes[0]


@pytest.mark.parametrize("name", TWINS)
def test_no_range_is_named(run_here: RunHere, name: str) -> None:
    fixes = run_here(TWINS[name]).fixes
    assert fixes
    assert not any("(raw)" in each for each in fixes)
