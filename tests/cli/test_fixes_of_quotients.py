"""``fxguard run``: what to change where both sides of a quotient became 0, or its divisor did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import math\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
SUBTRACT = "fix: take exp(a - b) in place of exp(a) / exp(b)"
AVERAGE = "fix: average (x - mean) ** 2 in place of x ** 2"

EXPONENTIALS = {
    "a density by a distribution": (
        "x = torch.tensor([-3.0, -40.0])\n"
        "pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)\n"
        "print((pdf / torch.exp(torch.special.log_ndtr(x))).sum().item())\n"
    ),
    "two likelihoods": (
        "def likelihood(x, mean):\n"
        "    return (-((x - mean) ** 2)).exp()\n"
        "x = torch.linspace(0, 30, 5)\n"
        "ratio = likelihood(x, 1.0) / likelihood(x, 2.0)\n"
        "print(ratio.mean().item())\n"
    ),
    "factors on both sides": (
        "t = torch.tensor([1.0, 300.0])\n"
        "print((3 * torch.exp(-t) / (torch.exp(-1.5 * t) * 0.5)).sum().item())\n"
    ),
    "powers of 2, and views": (
        "t = torch.tensor([[1.0, 300.0]])\n"
        "a, b = torch.exp2(-t), torch.exp2(-t * 2)\n"
        "print((a.reshape(2, 1) / b.squeeze(0)[:, None]).sum().item())\n"
    ),
    "in a model": (
        "class Ratio(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.exp(-x) / torch.exp(-2 * x)\n"
        "Ratio()(torch.full((3,), 200.0))\n"
    ),
}

OTHERS = {
    "a softmax by hand": (
        "x = torch.tensor([-200.0, -300.0])\n"
        "print((torch.exp(x) / torch.exp(x).sum()).sum().item())\n"
    ),
    "a divisor that is none": (
        "x = torch.tensor([0.0, 1.0])\nprint((torch.exp(-200 * torch.ones(2)) / x).sum().item())\n"
    ),
    "a difference of exponentials": (
        "x = torch.tensor([0.0, 1.0])\nprint(((x.exp() - 1) / (x.exp() - 1)).sum().item())\n"
    ),
}

MOMENTS = (
    "class Norm(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.register_buffer('first', torch.zeros(()))\n"
    "        self.register_buffer('second', torch.zeros(()))\n"
    "    def forward(self, x):\n"
    "        with torch.no_grad():\n"
    "            self.first.lerp_(x.mean(), 1.0)\n"
    "            self.second.lerp_((x * x).mean(), 1.0)\n"
    "        sd = torch.sqrt(self.second - self.first ** 2)\n"
    "        return (x - self.first) / sd\n"
)

LAW = (
    "x = torch.tensor([0.5, 3.0, 190.0], requires_grad=True)\n"
    "w = torch.rand(3)\ny = {}\ny.sum().backward()\n"
)
LESS_ONE = "fix: take a * exp(-x) / -expm1(-x) instead of a / (exp(x) - 1): equal for x above 0"
BOTH = "fix: divide both sides of the quotient by exp(x) or a power of it"
OVERFLOWS = {
    "Planck's law": ("1.0 / (w ** 5 * (torch.exp(x) - 1.0))", LESS_ONE),
    "a mean energy": ("x / (x.exp() - 1)", LESS_ONE),
    "a decay": ("w / torch.exp(x)", "fix: take a * exp(-x) instead of a / exp(x)"),
    "occupations": ("1 / (1 + torch.exp(x))", "fix: take a * sigmoid(-x) instead of a / (1 + exp"),
    "a heat capacity": ("x ** 2 * torch.exp(x) / (torch.exp(x) - 1) ** 2", BOTH),
    "a term beside it": ("w / (2 + torch.exp(x))", BOTH),
}
NO_DIVISORS = {
    "a factor": "w * torch.exp(x)",
    "a dividend": "(torch.exp(x) - 1) / w",
    "a sum of all": "w / torch.exp(x).sum()",
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_exponential_that_divides(run_here: RunHere, name: str) -> None:
    formula, fix = OVERFLOWS[name]
    found = run_here(HEAD + LAW.format(formula))
    assert found.fixes[0].startswith(fix), found.err


@pytest.mark.parametrize("formula", NO_DIVISORS.values(), ids=NO_DIVISORS)
def test_an_exponential_that_does_not(run_here: RunHere, formula: str) -> None:
    found = run_here(HEAD + LAW.format(formula))
    assert found.fixes, found.err
    assert not any("exp(-x)" in each for each in found.fixes), found.fixes


@pytest.mark.parametrize("text", EXPONENTIALS.values(), ids=EXPONENTIALS)
def test_exponents_are_subtracted(run_here: RunHere, text: str) -> None:
    err = run_here(HEAD + text).err
    assert SUBTRACT in err, err


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_not_where_no_exponents_are_divided(run_here: RunHere, text: str) -> None:
    err = run_here(HEAD + text).err
    assert "fix:" in err, err
    assert "exp(a - b)" not in err


def test_a_variance_of_which_only_roundings_are_left(run_here: RunHere) -> None:
    """In float64 it is 1.3."""
    text = f"{HEAD}{MOMENTS}Norm()(5000 + 0.5 * torch.arange(8.0))\n"
    err = run_here(text).err
    assert err.splitlines()[0].endswith(": rounding"), err
    assert AVERAGE in err


def test_not_of_a_variance_that_is_0(run_here: RunHere) -> None:
    """Nothing has cancelled there: an eps is missing."""
    err = run_here(f"{HEAD}{MOMENTS}Norm()(torch.full((8,), 4.0))\n").err
    assert "fix:" in err, err
    assert AVERAGE not in err
