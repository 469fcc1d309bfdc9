"""One input of a batch that is far from the others, in the sample that overflowed, is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
DATA = "x = 290 + torch.arange(12.0)\nx[{row}] = {number}\nw = torch.rand(12)\n"
NET = (
    "class Rate(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.energy = nn.Parameter(torch.tensor(40.0))\n"
    "    def forward(self, kelvin, weight):\n"
    "        log_k = -self.energy / 0.008 * (1 / kelvin - 1 / 298.0)\n"
    "        {last}\nnet = Rate()\n"
)
OUTLIERS = {
    "a rate that overflows": (
        NET.format(last="return torch.exp(log_k) * weight")
        + DATA.format(row=5, number=-4)
        + "loss = net(x, w).mean()\nprint(loss.item())\n",
        "`kelvin`, -4 in sample 5, where the batch's median is 29",
    ),
    "one whose gradient is bad": (
        NET.format(last="return torch.exp(-torch.exp(log_k) * weight)")
        + DATA.format(row=3, number=-3.5)
        + "loss = net(x, w).sum()\nloss.backward()\nprint(net.energy.grad)\n",
        "`kelvin`, -3.5 in sample 3, where the batch's median is 29",
    ),
    "an input by name": (
        "class Growth(nn.Module):\n    def forward(self, age, size):\n"
        "        return (age * 2 + size.log()).exp().sqrt()\n"
        + DATA.format(row=11, number=4000).replace("290 +", "")
        + "print(Growth()(age=x, size=1 + w).sum().item())\n",
        "`age`, 4000 in sample 11, where the batch's median is 5",
    ),
    "of a column": (
        "class Growth(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Parameter(torch.ones(1))\n    def forward(self, dose):\n"
        "        return torch.exp(self.a * dose / 30)\n"
        + DATA.format(row=0, number=9000)
        + "print(Growth()(x[:, None]).log().sum().item())\n",
        "`dose`, 9000 in sample 0, where the batch's median is 29",
    ),
}
NONE = {
    "all are large": NET.format(last="return torch.exp(log_k) * weight")
    + "x, w = -4 - torch.rand(12), torch.rand(12)\nprint(net(x, w).mean().item())\n",
    "another sample is far": "class Growth(nn.Module):\n    def forward(self, age, other):\n"
    "        return torch.exp(age + 0 * other)\n"
    "age, other = torch.full((12,), 100.0), torch.arange(12.0)\nother[4] = 900\n"
    "print(Growth()(age, other).sum().item())\n",
    "few samples": NET.format(last="return torch.exp(log_k) * weight")
    + "print(net(torch.tensor([290.0, 300, -4]), torch.rand(3)).mean().item())\n",
}


@pytest.mark.parametrize("name", OUTLIERS)
def test_an_input_that_is_far_from_the_others(run_here: RunHere, name: str) -> None:
    text, fix = OUTLIERS[name]
    err = run_here(HEAD + text).err
    assert f"look at {fix}" in err, err


@pytest.mark.parametrize("name", NONE)
def test_no_input_is_far_from_the_others(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + NONE[name]).err
    assert "fix: " in err, err
    assert "where the batch's median" not in err, err
