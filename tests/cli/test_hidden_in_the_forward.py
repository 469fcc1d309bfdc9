"""``fxguard run`` of scripts that hide a bad number in the forward, and meet it in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import torch\ntorch.manual_seed(0)\nw = torch.rand(3, requires_grad=True)\n"

# What the script computed without gradients, and the line that first made something bad.
COMPUTED = {
    "a step that is adapted": (
        "h = torch.full((3,), 0.1)\n"
        "y = torch.ones(3)\n"
        "for _ in range(4):\n"
        "    new = y + h * w * y\n"
        "    with torch.no_grad():\n"
        "        err = torch.tensor([0.1, 0.2, 0.0])\n"
        "        h = 0.5 * h * (0.01 / err) * torch.tensor([1.0, 1.0, 0.0])\n"
        "    y = torch.where(err > 0, new, y)\n"
        "y.sum().backward()\n",
        "div made inf (script.py:10): division by zero",
    ),
    "weights of distances": (
        "d = torch.tensor([0.0, 1.0, 2.0])\n"
        "near = 1 / d\n"
        "loss = torch.where(d > 0, near * w, torch.zeros(3)).sum()\n"
        "loss.backward()\n",
        "div made inf (script.py:5): division by zero",
    ),
    "a logarithm of counts": (
        "n = torch.tensor([0.0, 3.0, 2.0])\n"
        "levels = (n - 1).log()\n"
        "loss = (w * levels).masked_fill(n == 0, 0).sum()\n"
        "loss.backward()\n",
        "log made NaN (script.py:5): log of a negative number",
    ),
}

# It came so from outside, or was written on purpose.
GIVEN = {
    "missing values": (
        "y = torch.tensor([1.0, float('nan'), 2.0])\n"
        "loss = torch.where(y.isnan(), torch.zeros(3), (w * y) ** 2).sum()\n"
        "loss.backward()\n"
    ),
    "values that are dropped": (
        "y = torch.rand(3)\n"
        "y[1] = float('nan')\n"
        "loss = torch.where(y.isnan(), torch.zeros(3), (w * y) ** 2).sum()\n"
        "loss.backward()\n"
    ),
}

# Logarithms of 0 that are meant: what cannot be.
MEANT = (
    "start = torch.tensor([1.0, 0.0]).log()\n"
    "moves = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()\n"
    "score = start + w[:2].log_softmax(0)\n"
    "score = torch.logsumexp(score[:, None] + moves + w[:2].log_softmax(0), 0)\n"
    "loss = -torch.logsumexp(score, 0)\nloss.backward()\n"
)


def test_what_is_meant_is_not_to_blame(run_here: RunHere) -> None:
    """The backward is, which has no derivative there."""
    err = run_here(HEAD + MEANT).err
    assert err.startswith("backward of logsumexp made NaN (script.py:7)"), err
    assert "begin with torch.finfo(torch.float32).min" in err


def test_complex_numbers_end_no_backward(run_here: RunHere) -> None:
    """Of which nobody can ask whether they are -inf."""
    text = (
        "d = torch.tensor([0.0, 1.0, 2.0])\n"
        "near = torch.complex(1 / d, d)\n"
        "loss = torch.where(d > 0, (near * w).abs(), torch.zeros(3)).sum()\n"
        "loss.backward()\nprint('the end')\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert "isneginf" not in ran.err
    assert "(script.py:5)" in ran.err or "gradient of w is NaN" in ran.err


@pytest.mark.parametrize("name", COMPUTED)
def test_what_made_it_is_named(run_here: RunHere, name: str) -> None:
    text, verdict = COMPUTED[name]
    err = run_here(HEAD + text).err
    assert err.startswith(verdict), err
    assert "the forward hid it" in err


@pytest.mark.parametrize("name", GIVEN)
def test_what_was_given_is_to_be_put_away_before(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + GIVEN[name]).err
    assert err.startswith("backward of "), err
    assert "put a where before the arithmetic" in err
