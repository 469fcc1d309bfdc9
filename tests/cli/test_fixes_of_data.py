"""``fxguard run`` on numbers that are 0 in the data, by rounding, or by counting.

Each rule has neighbours, which are written in other ways, and twins that need something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

# Likelihoods of data that ends where the density is 0.
DENSITY = (
    "from torch.distributions import Beta, Dirichlet, Gamma\n"
    "w = torch.tensor([2.0, 3.0], requires_grad=True)\ny = torch.tensor({})\n"
    "(-{}.log_prob({}).mean()).backward()\n"
)
SQUEEZE = "move `{}` off 0 and 1, by (y * (n - 1) + 0.5) / n of n samples"
RATES = (
    "from torch.distributions import Beta\nclass Rates(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.head = nn.Linear(3, 2)\n    def forward(self, x):\n"
    "        a, b = (1 + F.softplus(self.head(x))).unbind(-1)\n        return Beta(a, b)\n"
    "y = torch.tensor([0.2, 1.0, 0.7])\nrates = Rates()(torch.randn(3, 3))\n"
    "(-rates.log_prob(y).mean()).backward()\n"
)

BOXES = (
    "boxes = torch.tensor([[0.0, 0, 8, 8], [64, 3, 64, 9], [1, 1, 5, 3]])\n"
    "w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]\nout = nn.Linear(2, 2)\n"
    "t = {}\n(out(torch.randn(3, 2)) - t).square().mean().backward()\n"
)
EXTENT = "leave out what has no extent, where it is chosen before log: sub (script.py:6) makes 0"

HAZARDS = (
    "net = nn.Linear(4, 400)\nt = torch.tensor([5, 390, 200])\n"
    "h = torch.sigmoid(net(torch.randn(3, 4)))\ns = torch.cumprod(1 - h, {})\n{}"
    "(-at.log().mean()).backward()\n"
)
IN_LOGS = "take log(1 - h).cumsum(dim) instead of log(cumprod(1 - h, dim)); log1p(-h) is log(1 - h)"
BEGINS = "s = torch.cat([torch.ones({}), s], {})\n"

CLICKS = (
    "users, items = torch.tensor([0, 0, 2]), torch.tensor([1, 3, 2])\n{}\n"
    "w = torch.randn(4, 2, requires_grad=True)\nscale = {}\n"
    "((scale * clicks) @ w).square().sum().backward()\n"
)
COUNT = "clamp(min=1): a count may be 0, as of an empty mask or a node without edges"

SHARP = (
    "z = torch.tensor([[300.0, 0.0, 1.0]], requires_grad=True)\nT = 2.0\n{}\n"
    "(q / q.sum(1, keepdim=True)).square().sum().backward()\n"
)

POOL = (
    "x = torch.randn(2, 4, 30, requires_grad=True)\nm = torch.ones(2, 4, 1)\nm[1, :3] = 0\n"
    "f = x * m\ncov = f @ f.mT / 30\nlam, vec = torch.linalg.eigh(cov)\n{}\n"
    "out.square().sum().backward()\n"
)
FUNCTION = "give this function f of a matrix its own backward, with (f(a) - f(b)) / (a - b)"

POINCARE = (
    "x = (torch.rand(6, 2) * 0.2).requires_grad_()\nu, v = x[[0, 1, 2]], x[[3, 1, 5]]\n"
    "sq = {}\na, b = 1 - u.square().sum(-1), 1 - v.square().sum(-1)\n"
    "torch.acosh({}).sum().backward()\n"
)
EQUAL = "; or leave out pairs of equal points, such as of one and itself"

FIRST = {
    "a point and itself": (
        POINCARE.format("((u - v) ** 2).sum(-1)", "1 + 2 * sq / (a * b)"),
        EQUAL,
    ),
    "the same by square": (
        POINCARE.format("(u - v).square().sum(dim=-1)", "sq.mul(2).div(a * b) + 1"),
        EQUAL,
    ),
    "a share of nothing": (
        DENSITY.format("[0.0, 0.5]", "Beta(w, w + 1)", "y"),
        SQUEEZE.format("y"),
    ),
    "a share of all": (
        DENSITY.format("[0.5, 1.0]", "Beta(w, w + 1)", "y * 1.0"),
        SQUEEZE.format("y * 1.0"),
    ),
    "a share beside a model": (RATES, SQUEEZE.format("y")),
    "a waiting time of 0": (
        DENSITY.format("[0.0, 0.5]", "Gamma(w, w)", "y"),
        "leave out where `y` is 0, or give such samples a likelihood of their own",
    ),
    "a composition": (
        DENSITY.format("[[0.0, 1.0]]", "Dirichlet(w)", "y"),
        "leave out where `y` is 0",
    ),
    "a box of no width": (BOXES.format("torch.log(torch.stack([w, h], 1) / 16)"), EXTENT),
    "boxes side by side": (BOXES.format("torch.stack([w.log(), h.log()], 1)"), EXTENT),
    "a survival": (HAZARDS.format(1, "at = s.gather(1, t[:, None])\n"), IN_LOGS),
    "a survival before": (
        HAZARDS.format(1, BEGINS.format("3, 1", 1) + "at = s.gather(1, t[:, None])\n"),
        IN_LOGS,
    ),
    "a survival by hand": (
        HAZARDS.format("-1", BEGINS.format("3, 1", -1) + "at = s[torch.arange(3), t]\n"),
        IN_LOGS,
    ),
    "clicks that are written": (
        CLICKS.format(
            "clicks = torch.zeros(3, 4)\nclicks[users, items] = 1.0",
            "clicks.sum(1, keepdim=True) ** -0.5",
        ),
        COUNT,
    ),
    "a mean of clicks": (
        CLICKS.format(
            "clicks = torch.zeros(3, 4).index_put((users, items), torch.tensor(1.0))",
            "1 / clicks.sum(1, keepdim=True)",
        ),
        "take clicks.sum(1, keepdim=True).clamp(min=1)",
    ),
    "a softmax that is sharpened": (
        SHARP.format("p = z.softmax(1)\nq = p ** (1 / T)"),
        "take exp((1 / T) * log_softmax(z, dim)) instead of softmax(z, dim) ** (1 / T)",
    ),
    "the same by a method": (
        SHARP.format("q = torch.softmax(z, -1).pow(0.5)"),
        "take exp(0.5 * log_softmax(z, dim)) instead of softmax(z, dim) ** 0.5",
    ),
    "a logarithm of a matrix": (
        POOL.format("out = vec @ torch.diag_embed((lam + 1e-3).log()) @ vec.mT"),
        FUNCTION,
    ),
    "a root of a matrix": (
        POOL.format("out = (vec * (lam + 1e-3).sqrt()[:, None]) @ vec.transpose(1, 2)"),
        FUNCTION,
    ),
}

TWINS = {
    "no distance": (
        POINCARE.format("torch.zeros(3)", "1 + 2 * sq * a"),
        EQUAL,
    ),
    "a bound on the data": (
        DENSITY.format("[0.0, 0.5]", "torch.special.xlogy(w, y)", "y").replace(".log_prob(y)", ""),
        "a likelihood of their own",
    ),
    "a silence": (
        "x = torch.zeros(64)\nx[40:] = torch.randn(24)\nw = torch.ones(1, requires_grad=True)\n"
        "p = x.reshape(8, 8).square().mean(1)\n(w * p.log()).sum().backward()\n",
        "has no extent",
    ),
    "a difference that is learned": (
        "a = torch.tensor([1.0, 2.0], requires_grad=True)\n"
        "torch.log(a - torch.tensor([1.0, 0.0])).sum().backward()\n",
        "has no extent",
    ),
    "a product of others": (
        HAZARDS.format(1, "at = (s * 0 + torch.relu(-h)).gather(1, t[:, None])\n"),
        "cumsum",
    ),
    "numbers that are written": (
        CLICKS.format(
            "clicks = torch.zeros(3, 4)\nclicks[users, items] = torch.tensor([0.5, 0.2, 0.1])",
            "clicks.sum(1, keepdim=True) ** -0.5",
        ),
        "a count may be 0",
    ),
    "a power of something else": (SHARP.format("q = (z / 300) ** -2.0"), "log_softmax"),
    "vectors alone": (POOL.format("out = vec.mT @ f"), FUNCTION),
}


LAST_STEP = (
    "def run(x, sigmas):\n    before = None\n    for i in range(len(sigmas) - 1):\n"
    "        t, t_next = -sigmas[i].log(), -sigmas[i + 1].log()\n        h = t_next - t\n"
    "        if before is not None:\n            r = before / h\n            x = x + {} * x\n"
    "        before = h\n    return x\nprint(run(torch.ones(2), {}).sum().item())\n"
)


@pytest.mark.parametrize("factor", ["1 / (2 * r)", "1 / r", "(2 * r).reciprocal()"])
def test_a_divisor_that_an_infinity_made_0(run_here: RunHere, factor: str) -> None:
    text = LAST_STEP.format(factor, "torch.tensor([4.0, 2.0, 1.0, 0.0])")
    said = "do without `r` where `h` is infinite, by if or where: sub (script.py:9) makes that"
    expect_first(run_here, text, said)


def test_a_divisor_that_is_0_by_itself(run_here: RunHere) -> None:
    text = LAST_STEP.format("1 / (0 * r)", "torch.tensor([4.0, 2.0, 1.0, 0.5])")
    expect_not_said(run_here, text, "is infinite")


EFFECTIVE = (
    "labels = torch.tensor([0, 2, 2])\nn = torch.bincount(labels, minlength=3).float()\n{}\n"
)


@pytest.mark.parametrize(
    "text",
    [
        "w = (1 - 0.99) / (1 - 0.99**n)\nprint((w / w.sum()).sum().item())",
        "beta = 0.9\nrest = 1 - beta**n\nprint(((1 - beta) / rest).sum().item())",
        "beta = 0.9\nprint((1.0 - torch.pow(beta, n)).reciprocal().sum().item())",
    ],
)
def test_effective_numbers_of_what_does_not_occur(run_here: RunHere, text: str) -> None:
    """An eps gives the largest weight to a class without a sample."""
    expect_first(run_here, EFFECTIVE.format(text), "give what does not occur the weight 0, by")


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    expect_first(run_here, *FIRST[name])


@pytest.mark.parametrize("name", TWINS)
def test_the_repair_is_not_said_of_something_else(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, *TWINS[name])
