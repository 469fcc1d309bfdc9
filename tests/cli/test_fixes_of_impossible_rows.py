"""A sum of probabilities none of which is possible: it has to run over more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ntorch.manual_seed(0)\n"
INF = "float('-inf')"
COUNTS = "y = torch.tensor([[2.0, 3.0], [9.0, 1.0], [0.0, 1.0]])\n"
ALL = "all {} terms of a row are -inf"

# The program, what is said first, and how many terms a row has.
IMPOSSIBLE = {
    "a count that is summed out": (
        COUNTS + "w = torch.zeros((), requires_grad=True)\n"
        "def log_p(y, n):\n"
        "    ll = torch.lgamma(n + 1) - torch.lgamma(y + 1) + y * F.logsigmoid(w)\n"
        f"    return ll.masked_fill(n < y, {INF})\n"
        "n = torch.arange(6.0)\n"
        "obs = log_p(y[:, :, None], n).sum(1)\n"
        "loss = -torch.logsumexp(obs - torch.lgamma(n + 1), dim=1).mean()\n"
        "loss.backward()\nprint(loss.item())\n",
        "extend `n` (script.py:10) if logsumexp runs over it",
        6,
    ),
    "in a module, with a buffer and where": (
        "class Mixture(nn.Module):\n    def __init__(self, most):\n        super().__init__()\n"
        "        self.register_buffer('sizes', torch.arange(float(most)))\n"
        "        self.rate = nn.Parameter(torch.ones(()))\n"
        "    def forward(self, y):\n        k = self.sizes\n"
        "        each = torch.log(k + 1) * y[..., None] - self.rate.exp()\n"
        f"        each = torch.where(k >= y[..., None], each, {INF})\n"
        "        return each.sum(dim=1).logsumexp(-1)\n"
        + COUNTS
        + "loss = Mixture(5)(y).sum().neg()\nloss.backward()\nprint(loss.item())\n",
        "extend `self.sizes` (script.py:8) if logsumexp runs over it",
        5,
    ),
    "components without a range": (
        "x = torch.tensor([0.2, 7.0])\nmean = torch.zeros(3, requires_grad=True)\n"
        "log_w = F.log_softmax(torch.zeros(3), 0)\n"
        "inside = (x[:, None] - torch.tensor([0.0, 1.0, 2.0])).abs() < 2\n"
        "log_f = -((x[:, None] - mean) ** 2) + log_w\n"
        f"log_f = log_f.masked_fill(~inside, {INF})\n"
        "nll = -log_f.logsumexp(1).mean()\nnll.backward()\nprint(nll.item())\n",
        "keep a term of each row of logsumexp possible",
        3,
    ),
    "terms of a list, summed and negated": (
        COUNTS + "p = torch.full((2,), 0.5, requires_grad=True)\n"
        "sizes = torch.linspace(1, 4, 4)\nterms = []\n"
        "for v in range(2):\n    logs = y[:, v, None] * p[v].log() + torch.lgamma(sizes)\n"
        f"    terms.append(logs.masked_fill(y[:, v, None] > sizes, {INF}))\n"
        "total = torch.stack(terms).sum(0)\n"
        "loss = (-torch.logsumexp(total, dim=-1)).sum()\nprint(loss.item())\n",
        "keep a term of each row of logsumexp possible",
        4,
    ),
    "a function that a loop calls": (
        COUNTS + "rate = torch.ones((), requires_grad=True)\n"
        "def marginal(row):\n    latent = torch.arange(4.0)\n"
        "    lp = torch.special.xlogy(row.sum(), rate) - torch.lgamma(latent + 1)\n"
        "    lp[latent < row.max()] = -torch.inf\n    return torch.logsumexp(lp, 0)\n"
        "out = [marginal(row) for row in y]\nprint(torch.stack(out).mean().item())\n",
        "extend `latent` (script.py:8) if logsumexp runs over it",
        4,
    ),
}

HEALTHY = {
    "a term of each row": COUNTS + "n = torch.arange(12.0)\n"
    "w = torch.zeros((), requires_grad=True)\n"
    "ll = torch.lgamma(n + 1) + y[:, :, None] * F.logsigmoid(w)\n"
    f"obs = ll.masked_fill(n < y[:, :, None], {INF}).sum(1)\n"
    "loss = -torch.logsumexp(obs - 3 * torch.lgamma(n + 1), 1).mean()\nloss.backward()\n"
    "print(loss.item())\n",
    "a row that is left out": "s = torch.randn(2, 3, requires_grad=True)\n"
    f"s = s.masked_fill(torch.tensor([[True] * 3, [False] * 3]), {INF})\n"
    "z = s.logsumexp(1)\nprint(z[torch.isfinite(z)].mean().item())\n",
    "states that cannot be reached": "a = torch.tensor([0.0, -torch.inf, -torch.inf])\n"
    "move = torch.tensor([[0.0, -1.0, -torch.inf]] * 3)\n"
    "for _ in range(2):\n    a = torch.logsumexp(a[:, None] + move, 0)\n"
    "print(a.logsumexp(0).item())\n",
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_the_sum_runs_over(run_here: RunHere, name: str) -> None:
    text, said, count = IMPOSSIBLE[name]
    err = run_here(HEAD + text).err
    assert err.startswith("logsumexp made -inf"), err
    assert f"fix: {said}: {ALL.format(count)}" in err, err
    assert "masked_fill(mask, 0)" not in err, err


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_not_where_a_row_has_a_term(run_here: RunHere, text: str) -> None:
    err = run_here(HEAD + text).err
    assert "made" not in err, err


def test_a_mask_of_padding_is_to_be_0(run_here: RunHere) -> None:
    """Those logarithms are summed up to the loss itself: -inf stands for what is not there."""
    text = (
        "x = torch.randn(2, 3, requires_grad=True)\npad = torch.tensor([[False] * 3, [True] * 3])\n"
        f"lp = F.logsigmoid(x).masked_fill(pad, {INF})\nloss = -lp.sum()\nprint(loss.item())\n"
    )
    err = run_here(HEAD + text).err
    assert "fix: set masked entries to 0 before the sum: masked_fill(mask, 0)" in err, err


def test_scores_are_no_logarithms(run_here: RunHere) -> None:
    """A sum of scores over heads before a softmax: the mask came too early."""
    text = (
        "s = torch.randn(2, 2, 3, requires_grad=True)\n"
        f"s = s.masked_fill(torch.tensor([True, False, False]), {INF})\n"
        "p = s.sum(2).softmax(-1)\nprint(p.sum().item())\n"
    )
    err = run_here(HEAD + text).err
    assert err.startswith("sum made -inf"), err


def test_a_recursion_begins_with_a_finite_number(run_here: RunHere) -> None:
    text = (
        "w = torch.zeros(3, requires_grad=True)\na = torch.full((3,), -torch.inf)\n"
        "for _ in range(3):\n    a = torch.logsumexp(a[:, None] + w, 0)\n"
        "loss = -a.mean()\nloss.backward()\nprint(loss.item())\n"
    )
    err = run_here(HEAD + text).err
    assert "masked_fill(mask, 0)" not in err, err
    assert "fix: begin logsumexp (script.py:8) with finite numbers" in err, err
