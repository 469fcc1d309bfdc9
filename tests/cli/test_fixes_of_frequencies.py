"""Logarithms of relative frequencies: what was counted 0 times is rare, and an eps is no share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxguard.measure.details import least_above_zero

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
ADD = "add 1 to the counts before they are divided by their sum (script.py:{}), as Laplace does: "
RARE = "what was counted 0 times is rare, not impossible"
TAKE = ", or take {}({}.clamp(min={})){}; an eps of 1e-12 makes {} of it"
LEAST = ", the smallest other number"

FREQUENCIES = {
    "popularity in an object": (
        "class Sampler:\n    def __init__(self, items):\n"
        "        counts = torch.bincount(items, minlength=5).float()\n"
        "        self.prob = counts / counts.sum()\n"
        "    def log_q(self, items):\n        return torch.log(self.prob[items])\n"
        "s = Sampler(torch.tensor([0, 0, 1, 2, 2, 2, 4]))\nscores = torch.randn(3)\n"
        "print((scores - s.log_q(torch.tensor([3, 0, 1]))).sum())\n",
        ADD.format(7) + RARE + TAKE.format("log", "self.prob[items]", "1 / 7", "", -28),
    ),
    "words among all words": (
        "tok = torch.tensor([0, 0, 1, 2, 2, 2, 4, 4])\n"
        "freq = torch.bincount(tok, minlength=6) / len(tok)\nprint(freq.log().sum())\n",
        ADD.format(5) + RARE + TAKE.format("log", "freq", "0.125", LEAST, -28),
    ),
    "priors of a model, a buffer": (
        "class M(torch.nn.Module):\n    def __init__(self, y):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(3, 4)\n        n = torch.bincount(y, minlength=4)\n"
        "        self.register_buffer('prior', n.float() / n.sum())\n"
        "    def forward(self, x):\n        return self.l(x) - torch.log(self.prior)\n"
        "y = torch.tensor([0, 0, 1, 3])\nF.cross_entropy(M(y)(torch.randn(4, 3)), y).backward()\n",
        ADD.format(9) + RARE + TAKE.format("log", "self.prior", "0.25", LEAST, -28),
    ),
    "priors of an array": (
        "import numpy as np\ny = np.array([0, 0, 1, 3])\n"
        "prior = np.bincount(y, minlength=4) / len(y)\nprior = torch.from_numpy(prior).float()\n"
        "net = torch.nn.Linear(3, 4)\nlogits = net(torch.randn(5, 3)) + prior.log()\n"
        "F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 0])).backward()\n",
        ADD.format(6) + RARE + TAKE.format("log", "prior", "0.25", LEAST, -28),
    ),
    "transitions": (
        "n = torch.zeros(3, 3)\npath = [0, 1, 0, 1, 2, 0, 0, 1]\n"
        "for a, b in zip(path, path[1:]):\n    n[a, b] += 1\n"
        "T = n / n.sum(1, keepdim=True)\nprint((T.log() * 0.5).sum())\n",
        ADD.format(8) + RARE + TAKE.format("log", "T", "0.25", LEAST, -28),
    ),
    "terms of a document, in bits": (
        "doc = torch.tensor([0, 0, 1, 3, 3])\n"
        "tf = torch.zeros(5).scatter_add_(0, doc, torch.ones(5))\ntf = tf / tf.sum()\n"
        "print((torch.log2(tf) + 1).sum())\n",
        ADD.format(6) + RARE + TAKE.format("log2", "tf", "1 / 5", "", -40),
    ),
    "shares of classes": (
        "y = torch.tensor([0, 0, 1, 3])\nshare = F.one_hot(y, 5).float().mean(0)\n"
        "print((torch.log(share) - 1).sum())\n",
        ADD.format(5) + RARE + TAKE.format("log", "share", "0.25", LEAST, -28),
    ),
    "pointwise mutual information": (
        "n = torch.tensor([[3.0, 0], [1, 2]])\njoint = n / n.sum()\n"
        "pmi = torch.log(joint / (joint.sum(1, keepdim=True) * joint.sum(0)))\nprint(pmi.sum())\n",
        ADD.format(5) + RARE + "; an eps of 1e-12",
    ),
}

SMALLEST = ", the smallest other number: of an eps such as 1e-12 the logarithm is -28, and of the "

OTHERS = {
    "an entropy": (
        "n = torch.tensor([5.0, 0, 3])\np = n / n.sum()\nprint(-(p * p.log()).sum())\n",
        "take the log of p.masked_fill(p == 0, 1)",
    ),
    "counts": (
        "n = torch.tensor([[0.0, 3.0], [1.0, 2.0]])\nprint(n.log().sum())\n",
        "of counts take log1p(n), or log(n.clamp(min=1))",
    ),
    "shares of a learned vote": (
        "w = torch.tensor([-1.0, 2.0], requires_grad=True)\nh = torch.relu(w)\n"
        "p = h / h.sum()\n(-p.log().sum()).backward()\n",
        "bound the argument: log(p.clamp(min=1e-12)) (advice)",
    ),
    "a softmax": (
        "z = torch.tensor([0.0, 300.0], requires_grad=True)\n"
        "(-z.softmax(0).log()).sum().backward()\n",
        "take log_softmax(z, dim)",
    ),
    "counts that were smoothed, by weights that are 0": (
        "n = torch.tensor([5.0, 0, 3]) + 1\np = n / n.sum() * torch.tensor([1.0, 1.0, 0.0])\n"
        "q = p * 30\nprint(q.log().sum())\n",
        "bound the argument: log(q.clamp(min=1e-12)) (advice)",
    ),
    "pixels": (
        "img = torch.tensor([0.0, 255, 12, 80]) / 255\nprint(img.log().sum())\n",
        "bound the argument: log(img.clamp(min=0.0471))" + SMALLEST + "others none is below -3.1",
    ),
    "probabilities of another program": (
        "p = torch.tensor([0.0, 0.25, 0.75])\nx = torch.tensor([1, 0, 2])\n"
        "print(p[x].log10().sum())\n",
        "bound the argument: log10(p[x].clamp(min=0.25)), the smallest other number: of an eps "
        "such as 1e-12 the logarithm is -12, and of the others none is below -0.7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FREQUENCIES)
def test_counts_of_0_are_smoothed(run_here: RunHere, name: str) -> None:
    """Where they are divided, as far as the program tells; with the bound that is one count."""
    text, fix = FREQUENCIES[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err
    assert "  or: " not in err


@pytest.mark.parametrize("name", OTHERS)
def test_other_zeros_are_no_counts(run_here: RunHere, name: str) -> None:
    """Given numbers from 0 to 1 are bounded by the smallest of them; others by an eps."""
    text, fix = OTHERS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


def test_the_smallest_number_above_zero() -> None:
    """Of real, finite numbers that are no large tensor."""
    assert least_above_zero(torch.tensor([[0.0, -0.5], [2.0, 0.0]])) == 0.5
    assert least_above_zero(torch.tensor([0, 3], dtype=torch.int8)) == 3
    assert least_above_zero(torch.zeros(3)) is None
    assert least_above_zero(torch.tensor([])) is None
    assert least_above_zero(torch.tensor([0.0, 1.0, torch.inf])) is None
    assert least_above_zero(torch.tensor([0.0, 1j])) is None
    assert least_above_zero(torch.ones(1).expand(2**20 + 1)) is None
