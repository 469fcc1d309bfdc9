"""What ``fxguard run`` proposes first of pairs, counts, masks, gamma functions and schedules.

Each rule has neighbours, which are written in other ways, and twins that need something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

TRAINED = "net = nn.Linear(4, 3)\nx = torch.randn(8, 4)\nz = net(x)\n"
STEPS = (
    "net = nn.Linear(3, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n{}"
    "for it in range(12):\n{}    opt.zero_grad()\n    net(torch.ones(4, 3)).mean().backward()\n"
    "    opt.step()\n"
)

FIRST = {
    "forces of particles": (
        "x = torch.randn(6, 3, requires_grad=True)\nr = torch.cdist(x, x)\n"
        "(1 / r ** 2 * (1 - torch.eye(6))).sum().backward()\n",
        "put 1 on the diagonal of r ** 2 before div, as by + torch.eye(6)",
    ),
    "logarithms of distances": (
        f"{TRAINED}d = (z[:, None] - z[None]).norm(dim=-1)\n"
        "(-torch.log(d)[~torch.eye(8, dtype=torch.bool)].mean()).backward()\n",
        "put 1 on the diagonal of d before log",
    ),
    "roots of squared distances": (
        f"{TRAINED}d2 = (z.unsqueeze(1) - z.unsqueeze(0)).pow(2).sum(-1)\n"
        "(d2.sqrt() * torch.triu(torch.ones(8, 8), 1)).sum().backward()\n",
        "put 1 on the diagonal of d2 before sqrt",
    ),
    "pairs of each sample of a model": (
        "class Model(nn.Module):\n    def forward(self, p):\n"
        "        d = p.unsqueeze(2) - p.unsqueeze(1)\n"
        "        inverse = d.square().sum(-1).rsqrt()\n"
        "        return (inverse * (1 - torch.eye(5))).sum((1, 2))\n"
        "Model()(torch.randn(4, 5, 3, requires_grad=True)).sum().backward()\n",
        "put 1 on the diagonal of d.square().sum(-1) before rsqrt, as by + torch.eye(5)",
    ),
    "a branch that is scaled": (
        "x = torch.linspace(0, 1, 5, requires_grad=True)\nlog = torch.log(x) / 3 + 2\n"
        "log.masked_fill(x < 0.1, 0).sum().backward()\n",
        "choose a safe argument of log by where, too, such as torch.where(x < 0.1, 1, x)",
    ),
    "a transfer function": (
        "x = torch.linspace(0, 1, 5, requires_grad=True)\nlow = 12.92 * x\n"
        "high = 1.055 * x ** (1 / 2.4) - 0.055\n"
        "torch.where(x <= 0.0031308, low, high).sum().backward()\n",
        "safe argument of pow by where, too, such as torch.where(x <= 0.0031308, 1, x)",
    ),
    "a transfer function with its branches exchanged": (
        "x = torch.linspace(0, 1, 5, requires_grad=True)\nlow = 903.3 * x\n"
        "high = 116 * x ** (1 / 3) - 16\n"
        "torch.where(x > 0.008856, high, low).sum().backward()\n",
        "safe argument of pow by where, too, such as torch.where(x > 0.008856, x, 1)",
    ),
    "a gamma function of a relu": (
        "a = F.relu(nn.Linear(3, 4)(torch.randn(9, 3)))\ntorch.lgamma(a).sum().backward()\n",
        "make a positive where it is computed, by softplus(...) + 1e-3 in place of relu",
    ),
    "a gamma function of a sum of clamped numbers": (
        "a = nn.Linear(3, 4)(torch.randn(40, 3)).clamp(min=0)\n"
        "(torch.lgamma(a.sum(-1)) - torch.lgamma(a).sum(-1)).mean().backward()\n",
        "by softplus(...) + 1e-3 in place of clamp",
    ),
    "counts with a code": (
        "x = torch.from_numpy(np.array([[5, -1], [3, 2], [-1, 9]], dtype='float32'))\n"
        "nn.Linear(2, 1)(torch.log1p(x)).mean().backward()\n",
        "x is -1 in the data, as where a number is missing",
    ),
    "attention over a padded sample": (
        "class Attention(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.q = nn.Linear(4, 4)\n    def forward(self, x, pad):\n"
        "        s = self.q(x) @ x.transpose(1, 2)\n"
        "        s = s.masked_fill(pad[:, None, :], -math.inf)\n"
        "        return s.softmax(-1) @ x\n"
        "pad = torch.zeros(3, 5, dtype=torch.bool)\npad[1] = True\n"
        "Attention()(torch.randn(3, 5, 4), pad).mean().backward()\n",
        "set to 0 what softmax returns there, by masked_fill(pad[:, None, :], 0)",
    ),
    "a mask of what is kept": (
        "s = torch.randn(3, 5, requires_grad=True)\n"
        "mask = torch.arange(5)[None] < torch.tensor([5, 0, 2])[:, None]\n"
        "s2 = torch.where(mask, s, float('-inf'))\n"
        "torch.log_softmax(s2, -1)[:, 0].sum().backward()\n",
        "set to 0 what log_softmax returns there, by masked_fill(~mask, 0)",
    ),
    "an optimal transport": (
        "cost = torch.rand(6, 5, requires_grad=True) + 3\nv = torch.ones(5)\n"
        "for reg in (0.06, 0.05, 0.045, 0.04):\n    K = torch.exp(-cost / reg)\n"
        "    u = 1 / (K @ v)\n    (u[:, None] * K * v).sum().backward(retain_graph=True)\n",
        "work in logs from exp (script.py:8) on, with logsumexp in place of matmul",
    ),
    "weights of classes": (
        "y = torch.tensor([0, 2, 2, 0, 3])\ncounts = torch.bincount(y, minlength=4).float()\n"
        "w = len(y) / (4 * counts)\n"
        "x = torch.randn(5, 4)\n"
        "F.cross_entropy(nn.Linear(4, 4)(x), y, w, label_smoothing=0.1).backward()\n",
        "give what was counted 0 times the weight 0, by where(d == 0, 0, ... / d.clamp(min=1)), "
        "with d = 4 * counts",
    ),
    "squares kept in half precision": (
        "v = (torch.randn(4) * 1e-4).half() ** 2 * 0.1\nm = torch.zeros(4, dtype=torch.float16)\n"
        "print(m / (v.sqrt() + 1e-8))\n",
        "keep all that div is computed from in float32, also what is kept from step to step",
    ),
    "gradients that a scale made infinite": (
        "net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).half()\n"
        "master = [p.detach().float().clone() for p in net.parameters()]\nscale = 2.0 ** 10\n"
        "for step in range(60):\n    x = torch.randn(64, 20)\n    net.zero_grad()\n"
        "    loss = F.smooth_l1_loss(net(x.half()).float(), 2 * x[:, :1])\n"
        "    (loss * scale).backward()\n"
        "    grads = [p.grad.float() / scale for p in net.parameters()]\n"
        "    if any(torch.isnan(g).any() for g in grads):\n        scale /= 2\n        continue\n"
        "    scale *= 2\n    for w, g, p in zip(master, grads, net.parameters()):\n"
        "        w.sub_(0.01 * g)\n        p.data.copy_(w)\n",
        "isfinite(p.grad).all(), and lower the loss scale if there is one: isnan does not see inf",
    ),
    "gradients of a copy that a scale made infinite": (
        "net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).half()\n"
        "half = list(net.parameters())\n"
        "full = [p.detach().float().clone().requires_grad_() for p in half]\n"
        "opt, scale = torch.optim.Adam(full, 1e-3), 2.0 ** 10\ndef step(scale):\n"
        "    for m, h in zip(full, half):\n        m.grad = h.grad.float() / scale\n"
        "    nn.utils.clip_grad_norm_(full, 1.0)\n    opt.step()\n"
        "for it in range(60):\n    x = torch.randn(64, 20)\n    net.zero_grad()\n"
        "    loss = F.smooth_l1_loss(net(x.half()).float(), 2 * x[:, :1])\n"
        "    (loss * scale).backward()\n"
        "    if any(torch.isnan(p.grad).any() for p in half):\n        scale /= 2\n"
        "    else:\n        step(scale)\n        scale *= 2\n",
        "skip a step where a gradient, here `h.grad`, is not finite, by "
        "torch.isfinite(h.grad).all(), and lower the loss scale if there is one: isnan does not",
    ),
    "a schedule of one's own": (
        "class Poly:\n    def __init__(self, opt, total):\n"
        "        self.opt, self.total, self.n = opt, total, np.float64(0)\n"
        "    def step(self):\n        self.n += 1\n        warm = min(1.0, self.n / 3)\n"
        "        rate = 0.1 * warm * np.power(1 - self.n / self.total, 0.9)\n"
        "        for g in self.opt.param_groups:\n            g['lr'] = rate\n"
        + STEPS.format("schedule = Poly(opt, 8)\n", "    schedule.step()\n"),
        "np.power(1 - 9.0 / 8, 0.9) (script.py:11), a fractional power of a negative number: it is "
        "stepped more often than the 8 times it was made for",
    ),
    "a rate that the loop sets": (
        STEPS.format(
            "",
            "    rate = 0.1 * np.float64(1 - it / 10) ** 0.9\n"
            "    for g in opt.param_groups:\n        g['lr'] = rate\n",
        ),
        "np.float64(1 - 11 / 10) ** 0.9 (script.py:8), a fractional power of a negative number",
    ),
}

TWINS = {
    "a row of zeros": (
        "x = torch.randn(6, 6)\nx[2] = 0\nprint((1 / (x - 0 * x)).sum())\n",
        "diagonal",
    ),
    "zeros on a diagonal and elsewhere": (
        "a, b = torch.rand(6, 6), torch.zeros(6, 6)\na[[0, 1, 2], [0, 1, 5]] = 0\n"
        "print((1 / (a - b)).sum())\n",
        "diagonal",
    ),
    "numbers that are no counts": (
        "r = torch.tensor([[0.3, -1.0], [0.1, 0.2]])\nnn.Linear(2, 1)(torch.log1p(r)).mean()\n",
        "is missing",
    ),
    "a mean over counts": (
        "s, n = torch.randn(4), torch.tensor([3.0, 0.0, 2.0, 5.0])\nprint(s / n)\n",
        "the weight 0",
    ),
    "a gamma function of what a layer makes": (
        "a = nn.Linear(3, 4)(torch.randn(9, 3)).round()\ntorch.lgamma(a).sum().backward()\n",
        "softplus",
    ),
    "half precision that is trained": (
        "w = torch.zeros(4, dtype=torch.float16, requires_grad=True)\n"
        "((w * 0) / (w.square().sqrt() + 1e-8)).sum().backward()\n",
        "from step to step",
    ),
    "a difference of masked numbers": (
        "s = torch.full((2, 3), -math.inf)\nprint((s - s.amax(1, keepdim=True)).exp())\n",
        "drop the row",
    ),
    "a rate that something else makes": (
        STEPS.format(
            "",
            "    rate = float(torch.tensor(float('nan')))\n"
            "    for g in opt.param_groups:\n        g['lr'] = rate\n",
        ),
        "fractional power",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    program, fix = FIRST[name]
    ran = run_here(IMPORTS + program)
    assert fix in ran.fixes[0], ran.err


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_told_something_else(run_here: RunHere, name: str) -> None:
    program, fix = TWINS[name]
    ran = run_here(IMPORTS + program)
    assert ran.fixes, ran.err
    assert not any(fix in told for told in ran.fixes), ran.err
