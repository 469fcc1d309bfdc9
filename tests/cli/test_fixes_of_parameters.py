"""``fxguard run`` on exponentials of a parameter, which each step moves on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

TRAINED = (
    "opt = torch.optim.SGD({}, lr=3.0)\nfor _ in range(60):\n    opt.zero_grad()\n"
    "    {}.backward()\n    opt.step()\n"
)
TASKS = (
    "class Tasks(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.log_var = nn.Parameter(torch.zeros(2))\n    def forward(self, losses):\n{}\n"
    "tasks = Tasks()\n" + TRAINED.format("tasks.parameters()", "tasks(torch.tensor([0.0, 1.0]))")
)
BOUND = "bound the parameter `{}` where it is read, by clamp(-10, 10): each step moves it on"

OF_PARAMETERS = {
    "of a module": (
        TASKS.format("        return (torch.exp(-self.log_var) * losses + self.log_var).sum()"),
        "log_var",
    ),
    "one by one": (
        TASKS.format(
            "        total = 0.0\n        for s, loss in zip(self.log_var, losses):\n"
            "            total = total + torch.exp(-2 * s) * loss + 0.5 * s\n        return total"
        ),
        "s",
    ),
    "an entry": (
        TASKS.format(
            "        a = self.log_var[0]\n"
            "        return (-a).exp() * losses[0] + self.log_var.sum()"
        ),
        "a",
    ),
    "of a script": (
        "log_scale = torch.zeros(3, requires_grad=True)\nx = torch.rand(8, 3) + 0.1\n"
        + TRAINED.format("[log_scale]", "(-30 * ((2 * log_scale).exp() * x).log().mean())"),
        "log_scale",
    ),
}


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_an_exponential_of_a_parameter(run_here: RunHere, name: str) -> None:
    text, parameter = OF_PARAMETERS[name]
    expect_first(run_here, text, BOUND.format(parameter))


OF_OTHERS = {
    "what a layer makes": (
        "net = nn.Linear(4, 2)\nx = 100 * torch.randn(32, 4)\n"
        "mean, log_var = net(x).unbind(1)\n"
        "(torch.exp(-4 * log_var) * mean.square() + log_var).mean().backward()\n"
    ),
    "data": "x = torch.full((3,), 90.0)\nw = torch.ones(3, requires_grad=True)\n"
    "(w * torch.exp(x)).sum().backward()\n",
    "a softmax by hand": "w = torch.full((3,), 90.0, requires_grad=True)\ne = torch.exp(w)\n"
    "(e / e.sum())[0].backward()\n",
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_exponential_of_something_else(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, OF_OTHERS[name], "bound the parameter")


def test_the_part_that_is_negative_is_told_by_its_text(run_here: RunHere) -> None:
    """It has no name where the line returns a quotient of it."""
    text = (
        "def dispersion(x):\n    mean = x.mean(1)\n"
        "    return (x.var(1) - mean * (1 / x).mean()) / mean**2\n"
        "x = 1 + torch.rand(3, 5)\ntheta = 1.0 / dispersion(x)\n"
        "print(torch.log(theta).sum().item())\n"
    )
    part = "bound `x.var(1) - mean * (1 / x).mean()`, which sub (script.py:7) makes negative"
    expect_first(run_here, text, part)
