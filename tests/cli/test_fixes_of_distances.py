"""A loss that pushes vectors apart falls without end: it needs a bound beside an exact rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = (
    "import torch\nimport torch.nn.functional as F\nnet = torch.nn.Linear(2, 2, bias=False)\n"
    "torch.nn.init.eye_(net.weight)\nx = torch.tensor([[0.0, 0.0], [6.75, 0.0]])\nz = net(x)\n"
)
EXACT = "  fix: take (logsumexp(x, dim) - log(n)) instead of log(mean(exp(x), dim))"
BOUND = (
    "  or: bound what {} (script.py:{}) reads, too, as by F.normalize({}, dim=-1): of what it "
    "makes the mean of exp is exp(-91), and this loss falls without end as the vectors move apart"
)

APART = {
    "a uniformity": (
        "torch.pdist(z).pow(2).mul(-2.0).exp().mean().log().backward()\n",
        BOUND.format("pdist", 7, "z"),
    ),
    "two batches": (
        "d = torch.cdist(z[:1], z[1:])\n(torch.exp(-2 * d ** 2).mean().log() * 3 + 1).backward()\n",
        BOUND.format("cdist", 7, "z[:1]"),
    ),
    "differences by hand": (
        "sq = (z[:1] - z[1:]).pow(2).sum(-1)\ntorch.exp(-sq / 0.5).mean().log().backward()\n",
        BOUND.format("sub", 7, "x"),
    ),
    "a model that makes both": (
        "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.net = net\n    def forward(self, x):\n        h = self.net(x)\n"
        "        return torch.pdist(h).square().neg().mul(2).exp().mean().log()\n"
        "M()(x).backward()\n",
        BOUND.format("pdist", 13, "h"),
    ),
}

OTHERS = {
    "a likelihood, which pulls them together": (
        "(-torch.pdist(z).pow(2).mul(-2.0).exp().mean().log()).backward()\n"
    ),
    "vectors that are normalised": (
        "z = F.normalize(z + 0.1, dim=1)\nd = torch.pdist(z).pow(2)\n"
        "d.mul(-91 / d.detach().item()).exp().mean().log().backward()\n"
    ),
    "vectors that are bounded": (
        "z = torch.tanh(z)\nd = torch.pdist(z).pow(2)\nd.mul(-91.0).exp().mean().log().backward()\n"
    ),
    "energies": "z[1:, 0].mul(-13.5).exp().mean().log().backward()\n",
}


@pytest.mark.parametrize("name", APART)
def test_what_is_pushed_apart_is_bounded(run_here: RunHere, name: str) -> None:
    """After the exact rewrite, which alone lets it grow."""
    text, bound = APART[name]
    err = run_here(HEAD + text).err
    assert EXACT in err
    assert bound in err, err


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_pushed_apart(run_here: RunHere, name: str) -> None:
    """Only the exact rewrite is said."""
    err = run_here(HEAD + OTHERS[name]).err
    assert EXACT in err
    assert "bound what" not in err, err
