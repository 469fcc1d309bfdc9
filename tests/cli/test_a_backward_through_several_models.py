"""One backward through several models: the operation is named in the model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(6, 5)

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter({w})

    def forward(self, e):
        return torch.sqrt((e * self.w) ** 2)

class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, e):
        return torch.acos((e * 0 + 1))

back, middle = nn.Linear(5, 4), nn.Linear(4, 4)
"""
ZEROS, ONES = "torch.zeros(4)", "torch.ones(4)"

# What is wrong, and the first line of the verdict.
WRONG = {
    "a head": (ZEROS, "head = Root()\nhead(back(x)).sum().backward()\n", "sqrt in head made inf"),
    "a head and a loss": (
        ZEROS,
        "head = Root()\nF.mse_loss(head(back(x)), x[:, 1:]).backward()\n",
        "sqrt in head made inf and -inf",
    ),
    "a model between two": (
        ZEROS,
        "head = Root()\nmiddle(head(back(x))).sum().backward()\n",
        "sqrt in head made inf and -inf",
    ),
    "a frozen network": (
        ZEROS,
        "head = Root().requires_grad_(False)\nF.mse_loss(head(back(x)), x[:, 1:]).backward()\n",
        "sqrt in head made inf and -inf",
    ),
    "no weight of its own is reached": (
        ONES,
        "head = Angles()\nhead(back(x)).sum().backward()\n",
        "acos in head made -inf",
    ),
    "what a script computes between two": (
        ONES,
        "z = back(x)\nz = z + torch.sqrt(F.relu(z) * 0) * 2\nmiddle(z).sum().backward()\n",
        "sqrt made inf and -inf",
    ),
    "the loss": (
        ONES,
        "z = middle(back(x))\nd = ((z - z.detach()) ** 2).sum(1).sqrt()\nd.mean().backward()\n",
        "sqrt made inf",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_operation_is_named(run_here: RunHere, name: str) -> None:
    """No model says that a gradient came in bad where another one, or the script, made it bad."""
    weight, text, made = WRONG[name]
    found, _, err = run_here(HEAD.replace("{w}", weight) + text)
    assert found == 3
    assert err.splitlines()[0].startswith(f"backward of {made}")


def test_what_is_right_ends_as_ever(ends_as_ever: EndsAsEver) -> None:
    """The same models with healthy numbers."""
    text = HEAD.replace("{w}", ONES)
    ends_as_ever(
        f"{text}head = Root()\nfor _ in range(3):\n"
        "    z = back(x)\n    z = z + torch.sqrt(F.relu(z) + 1) * 2\n"
        "    middle(head(z)).sum().backward()\n    print(back.weight.grad.sum().item())\n"
    )
