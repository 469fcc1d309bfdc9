"""What ``fxguard run`` proposes first: the repair that a program needs, in its own words.

Each kind of fault is written in several ways, and has a twin which looks like it and needs
something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"

WEIGHED = {
    "an entropy of numbers": (
        "p = torch.tensor([[0.0, 0.4, 0.6]])\n"
        "entropy = -torch.sum(p * torch.log(p), dim=-1)\nprint(entropy)\n",
        "xlogy(p, ",
    ),
    "a divergence from a target made beside a model": (
        "net = torch.nn.Linear(4, 3)\nx = torch.randn(5, 4)\n"
        "with torch.no_grad():\n    target = (torch.randn(5, 3) * 90).softmax(1) ** 2\n"
        "    target = target / target.sum(1, keepdim=True)\n"
        "logq = net(x).log_softmax(1)\n"
        "loss = (target * (torch.log(target) - logq)).sum(1).mean()\nloss.backward()\n",
        "take the log of target.masked_fill(target == 0, 1)",
    ),
    "a logarithm on a line of its own": (
        "net = torch.nn.Linear(4, 3)\nx = torch.randn(5, 4)\n"
        "with torch.no_grad():\n    t = torch.eye(5, 3) + 0\n    log_t = t.log()\n"
        "logq = net(x).log_softmax(1)\n"
        "loss = (t * (log_t - logq)).sum(1).mean()\nloss.backward()\n",
        "masked_fill(t == 0, 1)",
    ),
    "an entropy of what a parameter made": (
        "w = torch.zeros(3, requires_grad=True)\n"
        "p = torch.relu(w) / 3\n"
        "h = (p * p.log()).sum()\nh.backward()\n",
        "masked_fill(p == 0, 1)",
    ),
    "a divergence of ratios": (
        "p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25])\n"
        "print((p * (p / q).log()).sum())\n",
        "masked_fill(p / q == 0, 1)",
    ),
    "a mutual information": (
        "P = torch.tensor([[0.5, 0.5], [0.0, 0.0]])\n"
        "d = P.sum(1, keepdim=True) * P.sum(0, keepdim=True)\n"
        "print((P * torch.log(P / d)).sum())\n",
        "leave out where P is 0 before the division",
    ),
    "weights by counts": (
        "n = torch.tensor([[0.0, 3.5], [1.0, 0.5]], dtype=torch.float64)\n"
        "log_n = torch.log(n)\nf = torch.clamp((n / 100) ** 0.75, max=1)\n"
        "w = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)\n"
        "loss = (f * torch.square(w - log_n)).sum()\nloss.backward()\n",
        "masked_fill(n == 0, 1)",
    ),
}

PRODUCTS = {
    "a mixture of densities in a loop": (
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(2, 9)\n"
        "    def forward(self, x, y):\n"
        "        w, mu, s = self.l(x).chunk(3, 1)\n"
        "        w, s, like = w.softmax(1), s.exp(), 0.0\n"
        "        for k in range(3):\n"
        "            z = (y - mu[:, k]) / s[:, k]\n"
        "            like = like + w[:, k] * torch.exp(-0.5 * z**2) / s[:, k]\n"
        "        return -like.log().mean()\n"
        "M()(torch.randn(16, 2), torch.randn(16) * 60).backward()\n",
        "work with logarithms: logsumexp of the exponents",
    ),
    "a logistic regression by hand": (
        "w = torch.randn(4, requires_grad=True)\n"
        "x, y = torch.randn(8, 4) * 100, torch.rand(8).round()\n"
        "p = 1 / (1 + torch.exp(-(x @ w)))\n"
        "loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()\nloss.backward()\n",
        "take logsigmoid(x) instead of log(1 / (1 + exp(-x)))",
    ),
    "a forward pass of a hidden Markov model": (
        "A = torch.full((2, 2), 0.5)\nB = torch.rand(2, 5) * 0.1\n"
        "obs = torch.randint(5, (200,))\nalpha = torch.full((2,), 0.5)\n"
        "for o in obs:\n    alpha = (alpha @ A) * B[:, o]\n"
        "print(torch.log(alpha.sum()).item())\n",
        "normalise `alpha` at every turn (script.py:9)",
    ),
    "one row after the other": (
        "A = torch.full((2, 2), 0.5)\nB = torch.rand(2, 5) * 0.1\n"
        "a = torch.zeros(150, 2)\na[0] = 0.5\n"
        "for t in range(1, 150):\n    a[t] = B[:, t % 5] * torch.mv(A.t(), a[t - 1])\n"
        "post = a[-1] / a[-1].sum()\nprint(post)\n",
        "normalise `a` at every turn (script.py:9)",
    ),
    "a belief": (
        "belief = torch.ones(8, dtype=torch.float64) / 8\n"
        "for _ in range(400):\n    belief = belief * (torch.rand(8, dtype=torch.float64) * 0.1)\n"
        "belief = belief / belief.sum()\nprint(belief.max().item())\n",
        "normalise `belief` at every turn (script.py:6)",
    ),
    "importance weights": (
        "lp = torch.randn(8, 300) - 3\nratio = lp.exp()\nw = ratio.prod(1)\n"
        "w = w / w.sum()\nprint((w * torch.arange(8)).sum())\n",
        "take softmax(lp.sum(dim), 0) in place of exp(lp).prod(dim)",
    ),
    "a posterior": (
        "lik = torch.rand(5, 400) * 0.1\nprior = torch.ones(5) / 5\n"
        "joint = prior * lik.prod(dim=1)\nprint(joint / joint.sum())\n",
        "add logarithms, and take softmax of the sum",
    ),
    "exponentials of energies": (
        "e = torch.rand(6) * 10 + 200\nw = torch.exp(-e)\nprint((w / w.sum()).max())\n",
        "take softmax(-e, dim) in place of exp(-e)",
    ),
}

SPREADS = {
    "weighted": (
        "x = torch.full((50, 2), 2500.3)\n"
        "w = torch.full((50,), 0.02)\n"
        "mu = w @ x\n"
        "var = w @ x.square() - mu.square()\n"
        "print(torch.log(var).sum())\n",
        "compute the variance as the mean of (x - mean) ** 2, or in float64",
    ),
    "of a batch": (
        "x = torch.full((50, 2), 3000.1)\n"
        "var = (x**2).mean(0) - x.mean(0)**2\n"
        "net = torch.nn.Linear(2, 1)\n"
        "net(x / 3000 - var.log10()).sum().backward()\n",
        "take ((x - x.mean(dim, keepdim=True)) ** 2).mean(dim) instead of E[x²] - E[x]²",
    ),
    "less another number": (
        "x = torch.full((50, 2), 3000.1)\n"
        "var = (x**2).mean(0) - x.mean(0)**2\n"
        "print(torch.log(var - 1e-3).sum())\n",
        "",
    ),
    "the scale of a flow": (
        "class Act(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.log_scale = torch.nn.Parameter(torch.zeros(2))\n"
        "        self.is_new = True\n"
        "    def forward(self, x):\n"
        "        if self.is_new:\n            with torch.no_grad():\n"
        "                self.log_scale.copy_(-x.std(0).log())\n"
        "            self.is_new = False\n"
        "        return x * self.log_scale.exp()\n"
        "x = torch.randn(8, 2)\nx[:, 1] = 3.0\nAct()(x).sum().backward()\n",
        "take 1 for a deviation of 0, ",
    ),
    "a likelihood": (
        "x = torch.randn(8, 2)\nx[:, 1] = 3.0\nnll = (torch.log(x.var(0)) + 1).sum()\nprint(nll)\n",
        "",
    ),
}


@pytest.mark.parametrize("name", SPREADS)
def test_a_spread_of_what_is_constant_or_far_from_0(run_here: RunHere, name: str) -> None:
    """Whose roundings are negative, or which is 0."""
    text, fix = SPREADS[name]
    err = run_here(HEAD + text).err
    first = err.partition("fix: ")[2].partition("\n")[0]
    assert first.startswith(fix), err
    others = {each for _, each in SPREADS.values() if each and each != fix}
    assert not any(each in err for each in others), err
