"""What ``fxguard run`` proposes of formulas of several fields, with neighbours and twins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS
from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

SCAN = (
    "a = torch.full((2, 400), 0.6).requires_grad_()\nu = torch.randn(2, 400)\n{}"
    "h.square().mean().backward()\n"
)
DECAYS = "do not divide by the product of all decays, {}: run the recurrence step by step"
TREATED = (
    "logit = torch.tensor([0.0, {}, 1.0], requires_grad=True)\nt = torch.tensor([0.0, 1.0, 1.0])\n"
    "{}\n((t / g - (1 - t) / (1 - g)) ** 2).mean().backward()\n"
)
TRIMMED = "keep g away from 0 and 1 where sigmoid (script.py:7) makes it, g.clamp(0.01, 0.99)"
SHARES = (
    "raw = torch.tensor([1.0, 2.0], requires_grad=True)\n"
    "a, b = torch.sigmoid(raw[0]), torch.sigmoid(raw[1])\n{}"
)
BELOW_ONE = "keep the sum of the sigmoids below 1, as by softmax of them and a rest"
WEIGHT = (
    "snr = torch.tensor([4.0, 0.5, 0.0])\nw = {}\n"
    "p = torch.randn(3, requires_grad=True)\n(w * p ** 2).mean().backward()\n"
)
POWERS = (
    "mu = torch.rand(5, requires_grad=True)\nfor power in {}:\n"
    "    loss = (mu.pow({e} - power) / ({e} - power)).sum()\n    loss.backward()\n"
)
POINTS = (
    "x = torch.randn(2, 6, 3)\n{}\nx.requires_grad_()\n"
    "v = torch.linalg.eigh({})[1]\n(v[..., 0] * torch.arange(3.0)).sum().backward()\n"
)
SIDES = (
    "k = torch.tensor([-0.2, 0.3], requires_grad=True)\n{}\n"
    "d = torch.where(k > 0, one, other)\nd.sum().backward()\n"
)
GRID = (
    "x = torch.randn(20, 6)\n{}\ncov = x.T @ x / 19\nw = torch.ones(6, requires_grad=True)\n"
    "(cov @ w).square().sum().backward()\n"
)
ROLLOUT = (
    "def rollout(n):\n    logp = {}\n    logp[:, :n] = -1.0\n    return torch.ones(4, 3), logp\n"
    "ids, old = rollout(2)\n"
    "policy = nn.Linear(3, 3)\nratio = torch.exp(policy(ids).log_softmax(-1) - old)\n"
    "(ratio * (old > -5)).mean().backward()\n"
)
CHOSEN = (
    "class Policy(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.w = nn.Parameter(torch.zeros(3))\n    def forward(self, old):\n"
    "        return (torch.exp(self.w - old) * {}).mean()\n"
    "old = torch.zeros(4, 3)\nold[:, 2] = -math.inf\nPolicy()(old).backward()\n"
)
PAIRS = (
    "z = torch.nn.functional.normalize(torch.randn(4, 8), dim=1).requires_grad_()\n"
    "s = (z @ z.T * 12){}\n{}\ne = torch.exp(s)\nd = {}.sum(1)\n"
    "(d.log() - s[0]).mean().backward()\n"
)
ADAM = (
    "p = torch.zeros(4).{}().requires_grad_()\nv = torch.zeros_like(p)\nfor t in range(3):\n"
    "    (p * torch.tensor([0, 1, 2, 3])).sum().backward()\n    with torch.no_grad():\n"
    "        g = p.grad\n        v.mul_(0.9).add_(g * g, alpha=0.1)\n"
    "        p.sub_(0.1 * g / (v.sqrt() + 1e-8))\n    p.grad = None\n"
)

FIRST = {
    "a scan by cumprod": (
        SCAN.format("p = torch.cumprod(a, 1)\nh = p * torch.cumsum(u / p, 1)\n"),
        DECAYS.format("cumprod (script.py:7)"),
    ),
    "a scan by exp": (
        SCAN.format("p = a.log().cumsum(1).exp()\nh = (u / p).cumsum(1) * p\n"),
        DECAYS.format("exp (script.py:7)"),
    ),
    "a propensity of 1": (TREATED.format("90.0", "g = torch.sigmoid(logit)"), TRIMMED),
    "a propensity of 0": (TREATED.format("-200.0", "g = logit.sigmoid()"), TRIMMED),
    "a variance of a GARCH model": (
        SHARES.format("h = 0.1 / (1.0 - a - b)\ntorch.log(h).backward()\n"),
        BELOW_ONE,
    ),
    "what two shares leave": (SHARES.format("torch.sqrt(1 - (a + b)).backward()\n"), BELOW_ONE),
    "a recursion that begins with it": (
        SHARES.format(
            "h = 0.1 / (1 - a - b)\nout = [h]\nfor t in range(5):\n    h = 0.1 + a * 0.2 + b * h\n"
            "    out.append(h)\ntorch.log(torch.stack(out)).sum().backward()\n"
        ),
        BELOW_ONE,
    ),
    "Min-SNR": (
        WEIGHT.format("torch.minimum(snr, torch.full_like(snr, 5.0)) / snr"),
        "take (c / snr).clamp(max=1), with the cap c: it is equal, and 1 where snr is 0; or, where "
        "the model predicts v, divide by (snr + 1)",
    ),
    "Min-SNR by clamp": (
        WEIGHT.format("snr.clamp(max=5.0) / snr"),
        "take (c / snr).clamp(max=1), with the cap c: it is equal, and 1 where snr is 0; or, where "
        "the model predicts v, divide by (snr + 1)",
    ),
    "the end of a schedule": (
        POWERS.format("(1.1, 1.5, 2.0)", e="2.0"),
        "keep power from becoming 2.0, such as by a schedule that ends before it",
    ),
    "an end that is a whole number": (
        "mu = torch.rand(5, requires_grad=True)\nfor power in (1.5, 1.25, 1.0):\n"
        "    (mu.pow(1 - power) / (1 - power)).sum().backward()\n",
        "keep power from becoming 1, such as by a schedule that ends before it",
    ),
    "points that are equal": (
        POINTS.format(
            "x[1] = x[1, :1]", "(x - x.mean(1, keepdim=True)).mT @ (x - x.mean(1, keepdim=True))"
        ),
        "leave out, before eigh, what does not vary: points that repeat others",
    ),
    "both sides of a where": (
        SIDES.format("one = torch.sqrt(k).sinh()\nother = torch.sqrt(-k).sin()"),
        "and sqrt (script.py:7) of the other side likewise",
    ),
    "a fill value": (
        GRID.format("x[2:5, 1] = 1e20"),
        "leave out, before the arithmetic, what setitem (script.py:6) fills with 1e+20",
    ),
    "a fill value by a mask": (
        GRID.format("x = x.masked_fill(x > 1, 9.96921e36)"),
        "leave out, before the arithmetic, what masked_fill (script.py:6) fills with 9.96921e+36",
    ),
    "log-probabilities behind the end": (
        ROLLOUT.format('torch.full((4, 3), float("-inf"))'),
        "look at torch.full((4, 3), float('-inf')) (script.py:6): what it fills stays -inf",
    ),
    "the same by masked_fill": (
        ROLLOUT.format("torch.zeros(4, 3).masked_fill(torch.ones(4, 3) > 0, -math.inf)"),
        "(script.py:6): what it fills stays -inf",
    ),
    "a product with a mask": (
        CHOSEN.format("(old > -5)"),
        "choose before exp (script.py:10), by where(old > -5, ..., 0) of what it reads",
    ),
    "a contrastive loss in float16": (
        PAIRS.format(".half()", "off = 1 - torch.eye(4, dtype=s.dtype)", "(e * off).float()"),
        "mask with masked_fill(off == 0, -inf) what exp reads, in float32, and take logsumexp",
    ),
    "the same in float32 with a mask of bools": (
        PAIRS.format(" * 9", "off = ~torch.eye(4, dtype=torch.bool)", "(e * off)"),
        "what exp reads, in float32, and take logsumexp",
    ),
    "an own optimizer in float16": (
        ADAM.format("half"),
        "keep all that div is computed from in float32, also what is kept from step to step",
    ),
    "a group of one": (
        "x, g = torch.randn(5), torch.tensor([0, 0, 1, 2, 2])\n"
        "s = torch.stack([x[g == i].std() for i in range(3)])\nassert s.isfinite().all()\n",
        "take std of more than one element",
    ),
}

TWINS = {
    "a quotient that is not scanned": (
        SCAN.format("p = torch.cumprod(a, 1)\nh = u / p\n"),
        "do not divide by the product",
    ),
    "a probability of a softmax": (
        TREATED.format("200.0", "g = torch.softmax(torch.stack([logit, -logit]), 0)[0]"),
        "keep g away from 0 and 1",
    ),
    "free numbers": (
        "raw = torch.tensor([1.0, 2.0], requires_grad=True)\n"
        "torch.log(1 - raw[0] - raw[1]).backward()\n",
        "keep the sum of the sigmoids",
    ),
    "from another number than 1": (
        SHARES.format("torch.log(0.5 - a - b).backward()\n"),
        "keep the sum of the sigmoids",
    ),
    "another capped ratio": (
        WEIGHT.replace("snr", "norm").format("norm.clamp(max=5.0) / norm"),
        "predicts v",
    ),
    "a count": (
        "n = 2\nx = torch.rand(3, requires_grad=True)\n(x.sum() / (n - 2)).backward()\n",
        "keep n from becoming",
    ),
    "matrices that are padded": (
        POINTS.format("x = torch.zeros(2, 3, 3)\nx[:, 0, 0] = 1", "x + x.mT"),
        "what does not vary",
    ),
    "one side of a where": (
        SIDES.format("one = torch.sqrt(k)\nother = k * 2"),
        "of the other side likewise",
    ),
    "weights in a sum of exponentials": (
        PAIRS.format(".half()", "off = torch.rand(4, 4)", "(e * off).float()"),
        "mask with masked_fill",
    ),
    "a masked sum without a logarithm": (
        PAIRS.replace(".log()", "").format(".half()", "off = 1 - torch.eye(4)", "(e * off)"),
        "mask with masked_fill",
    ),
    "a mask that is subtracted": (
        GRID.format("x = x.masked_fill(x > 1, -1e30) * 1e10"),
        "leave out, before the arithmetic",
    ),
    "large numbers": (GRID.format("x = x * 1e20"), "leave out, before the arithmetic"),
    "a root of what is learned": (
        "w = torch.zeros(3, dtype=torch.float16, requires_grad=True)\n"
        "(torch.ones_like(w) / (w.square().sqrt() + 1e-8)).sum().backward()\n",
        "kept from step to step",
    ),
    "logarithms in a function": (
        ROLLOUT.format("torch.zeros(4, 3).log()"),
        "what it fills stays -inf",
    ),
    "a side whose derivative exists": (
        SIDES.format("one = torch.sqrt(k)\nother = torch.log(-k)"),
        "of the other side likewise",
    ),
    "a group of one is no batch": (FIRST["a group of one"][0], "drop_last"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    expect_first(run_here, *FIRST[name])


@pytest.mark.parametrize("name", TWINS)
def test_the_repair_is_not_said_of_something_else(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, *TWINS[name])


def test_a_recursion_of_order_two_counts_each_turn(run_here: RunHere) -> None:
    """Not every second one, though it reads what the turn before the last one made."""
    ran = run_here(
        f"{IMPORTS}a = torch.tensor([-3.0, 2.0], requires_grad=True)\nx = torch.ones(400)\n"
        "y1 = y2 = torch.zeros(())\nout = []\nfor t in range(400):\n"
        "    y = x[t] - a[0] * y1 - a[1] * y2\n    out.append(y)\n    y2, y1 = y1, y\n"
        "torch.stack(out).square().mean().backward()\n"
    )
    found = re.search(r"grew from (\S+) to (\S+) in (\d+) turns", ran.fixes[0])
    assert found is not None
    first, last, turns = map(float, found.groups())
    assert turns == pytest.approx(math.log2(last / first), abs=1)  # it doubles at each


def test_a_product_with_a_mask_shows_its_numbers(run_here: RunHere) -> None:
    """The mask is in no graph, and one number is no row."""
    assert (
        "at [0, 2]: mul(inf, …) (in sample 0" in run_here(IMPORTS + CHOSEN.format("(old > -5)")).err
    )
