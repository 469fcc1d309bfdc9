"""What ``fxguard run`` proposes first of rows that nothing was put into, scales, balls and sums.

Each rule has neighbours, which are written in other ways, and twins that need something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

EDGES = "x, to = torch.randn(6, 3), torch.tensor([0, 0, 1, 3, 3, 5])\n"
POINTS = (
    "u = torch.randn(5, 3, requires_grad=True)\nwith torch.no_grad():\n"
    "    u *= 0.5 / u.norm(dim=-1, keepdim=True)\n    u[2] *= 2.4\n"
)
TIMES = (
    "t = torch.linspace(0.1, 60, 200)\nbeta = torch.tensor(2.0, requires_grad=True)\n"
    "alpha = torch.tensor(0.5)\n"
)
SCHEDULE = (
    "net = nn.Linear(3, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
    "class Poly:\n    def __init__(self, opt, most):\n"
    "        self.opt, self.it, self.most = opt, 0, most\n{}"
    "poly = Poly(opt, 10)\nfor it in range(13):\n    opt.zero_grad()\n"
    "    net(torch.ones(4, 3)).mean().backward()\n    opt.step()\n    poly.step()\n"
)

FIRST = {
    "nodes without neighbours": (
        f"{EDGES}agg = torch.full((6, 3), float('-inf'))\n"
        "agg = agg.scatter_reduce(0, to[:, None].expand(6, 3), x, reduce='amax')\n"
        "nn.Linear(3, 2)(agg).mean().backward()\n",
        "rows into which it puts nothing keep what they began with: put 0 there, masked_fill",
    ),
    "nodes without neighbours in a layer": (
        "class Pool(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lin = nn.Linear(6, 2)\n    def forward(self, x, to):\n"
        "        best = x.new_full((6, 3), -math.inf)\n"
        "        best.index_reduce_(0, to, x, 'amax')\n"
        "        return self.lin(torch.cat([x, best], 1))\n"
        f"{EDGES}Pool()(x, to).mean().backward()\n",
        "best = best.masked_fill(best.isinf(), 0) behind index_reduce",
    ),
    "least of nothing": (
        f"{EDGES}low = torch.full((6, 3), math.inf)\n"
        "low = torch.scatter_reduce(low, 0, to[:, None].expand(6, 3), x, 'amin')\n"
        "w = nn.Linear(3, 2).weight\n(low @ w.t()).mean().backward()\n",
        "low = low.masked_fill(low.isinf(), 0) behind scatter_reduce",
    ),
    "quantised weights of a pruned channel": (
        "lin = nn.Linear(4, 3)\nwith torch.no_grad():\n    lin.weight[1] = 0\n"
        "scale = lin.weight.abs().amax(1, keepdim=True) / 127\n"
        "q = (lin.weight / scale).round() * scale\n(torch.randn(5, 4) @ q.t()).mean().backward()\n",
        "bound the scale, scale.clamp(min=1e-8)",
    ),
    "quantised activations of a dead layer": (
        "h = F.relu(nn.Linear(4, 3)(torch.randn(6, 4)) - 9)\n"
        "step = 2 * h.abs().max() / 255\nq = torch.round(h / step)\n"
        "(h + (q * step - h).detach()).mean().backward()\n",
        "bound the scale, step.clamp(min=1e-8)",
    ),
    "distances in the Poincaré ball": (
        f"{POINTS}v = u.detach().flip(0) * 0.1\nuu, vv = (u * u).sum(-1), (v * v).sum(-1)\n"
        "d = ((u - v) ** 2).sum(-1)\n"
        "torch.acosh(1 + 2 * d / ((1 - uu) * (1 - vv))).sum().backward()\n",
        "keep points inside the unit ball: 1 - |x|² is negative",
    ),
    "a conformal factor": (
        f"{POINTS}lam = 2 / (1 - u.pow(2).sum(-1))\ntorch.log(lam).sum().backward()\n",
        "keep points inside the unit ball",
    ),
    "a Lorentz factor": (
        f"{POINTS}gamma = 1 / torch.sqrt(1 - u.norm(dim=-1) ** 2)\ngamma.sum().backward()\n",
        "keep points inside the unit ball",
    ),
    "a Hawkes process": (
        f"{TIMES}grow = torch.exp(beta * t)\nbefore = torch.cumsum(grow, 0) - grow\n"
        "lam = 0.1 + alpha * torch.exp(-beta * t) * before\nlam.log().sum().backward()\n",
        "combine the exponents before exp",
    ),
    "a discounted sum": (
        f"{TIMES}w = (beta * t).exp()\ns = w.cumsum(0)\nd = (-(beta * t)).exp()\n"
        "((d * alpha) * s).sum().backward()\n",
        "combine the exponents before exp",
    ),
    "optimal transport with a small regulariser": (
        "x, y = torch.rand(20, 3, requires_grad=True), torch.rand(20, 3) + 3\n"
        "K = torch.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / 0.3)\nu = torch.ones(20)\n"
        "for _ in range(30):\n    v = 0.05 / (K.t() @ u)\n    u = 0.05 / (K @ v)\n"
        "(u[:, None] * K * v).sum().backward()\n",
        "work in logs from exp",
    ),
    "a softplus with its own backward": (
        "class Soft(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return F.softplus(x)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        x, = ctx.saved_tensors\n        e = x.exp()\n"
        "        return g * e / (1.0 + e)\n"
        "x = torch.tensor([0.3, 95.0], requires_grad=True)\nSoft.apply(x * 1.0).sum().backward()\n",
        "take a * sigmoid(x) instead of a * exp(x) / (1 + exp(x))",
    ),
    "the same in a model": (
        "class Soft(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return F.softplus(x)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        x, = ctx.saved_tensors\n        e = torch.exp(x)\n"
        "        return g * e / (1 + e)\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lin = nn.Linear(2, 3)\n    def forward(self, x):\n"
        "        return Soft.apply(self.lin(x) * 400)\n"
        "Net()(torch.randn(6, 2)).sum().backward()\n",
        "take torch.sigmoid(x) in place of e / (1 + e)",
    ),
    "the derivative of a swish in a model": (
        "class Swish(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return F.silu(x)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        x, = ctx.saved_tensors\n        e = torch.exp(x)\n"
        "        return g * e * (1 + e + x) / (1 + e) ** 2\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lin = nn.Linear(2, 3)\n    def forward(self, x):\n"
        "        return Swish.apply(self.lin(x) * 400)\n"
        "Net()(torch.randn(6, 2)).sum().backward()\n",
        "with s = torch.sigmoid(x), e / (1 + e) is s and 1 / (1 + e) is 1 - s",
    ),
    "a partial likelihood": (
        "risk = nn.Linear(2, 1)(torch.randn(30, 2)).squeeze(-1) * 1e3\n"
        "total = torch.cumsum(torch.exp(risk), 0)\n(torch.log(total) - risk).mean().backward()\n",
        "take logcumsumexp",
    ),
    "a kernel with lag 0": (
        "k, theta = torch.tensor([2.2, 1.5], requires_grad=True)\ns = torch.arange(8.0)\n"
        "w = torch.exp((k - 1) * s.log() - s / theta)\n(w / w.sum())[2].backward()\n",
        "keep 0 out of log",
    ),
    "a power law by logarithms": (
        "a = torch.tensor(0.7, requires_grad=True)\nr = torch.linspace(0, 2, 9)\n"
        "y = torch.exp(a * torch.log(r))\n(y - r.sqrt()).square().mean().backward()\n",
        "keep 0 out of log",
    ),
    "a matrix that is padded": (
        "a = torch.randn(3, 3, requires_grad=True)\nh = F.pad(a + a.t(), (0, 3, 0, 3))\n"
        "w, v = torch.linalg.eigh(h)\n(v[:, :2] ** 2).sum(1)[0].backward()\n",
        "on the diagonal where a matrix is padded with 0, here in rows 3 to 5",
    ),
    "molecules of several sizes": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Parameter(torch.randn(6))\n    def forward(self, real):\n"
        "        pairs = -1.0 * (real[:, 1:] & real[:, :-1])\n"
        "        h = torch.diag_embed(self.a * real) + torch.diag_embed(pairs, offset=1)\n"
        "        energy, c = torch.linalg.eigh(h + torch.diag_embed(pairs, offset=-1))\n"
        "        return (c[..., :2] ** 2).sum(-1)\n"
        "real = torch.arange(6) < torch.tensor([[6], [3]])\nNet()(real)[:, 0].sum().backward()\n",
        "on the diagonal where a matrix is padded with 0, here in rows 3 to 5",
    ),
    "a power law of distances": (
        "x, a = torch.randn(5, 2), torch.tensor(0.5, requires_grad=True)\n"
        "k = torch.exp(-a * torch.log(torch.cdist(x, x)))\n(1 / (1 + k)).sum().backward()\n",
        "keep 0 out of log",
    ),
    "messages that are added to what nodes hold": (
        "def largest(x, to, n):\n    out = x.new_full((n, x.size(1)), float('-inf'))\n"
        "    return out.scatter_reduce_(0, to.view(-1, 1).expand_as(x), x, 'amax')\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lin = nn.Linear(3, 2)\n    def forward(self, x, to):\n"
        "        return self.lin(x + largest(x.relu(), to, len(x)))\n"
        f"{EDGES}Net()(x, to).mean().backward()\n",
        "out = out.masked_fill(out.isinf(), 0) behind scatter_reduce",
    ),
    "normalisation of segments": (
        "class Pool(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = nn.BatchNorm1d(3)\n    def forward(self, x, to):\n"
        "        p = torch.full((6, 3), -math.inf)\n"
        "        p = p.scatter_reduce(0, to[:, None].expand_as(x), x.sin(), 'amax')\n"
        "        return self.norm(p)\n"
        f"{EDGES}Pool()(x, to).mean().backward()\n",
        "p = p.masked_fill(p.isinf(), 0) behind scatter_reduce",
    ),
    "an attention of all before": (
        "x = nn.Linear(2, 1)(torch.randn(30, 2) * 1e3).squeeze(-1)\n"
        "p = torch.exp(x) / torch.cumsum(torch.exp(x), 0)\n(-p.log()).mean().backward()\n",
        "take logcumsumexp",
    ),
    "a schedule that divides by nothing": (
        SCHEDULE.format(
            "    def rate(self):\n"
            "        done = np.float64(self.it - self.most) / (self.most - 10)\n"
            "        return 0.1 if self.it < self.most else 0.1 * float(done)\n"
            "    def step(self):\n        self.it += 1\n"
            "        for g in self.opt.param_groups:\n            g['lr'] = self.rate()\n"
        ),
        "computed: np.float64(10 - 10) / (10 - 10)",
    ),
    "a polynomial schedule in a method": (
        SCHEDULE.format(
            "    def factor(self):\n        return float(np.power(1 - self.it / self.most, 0.9))\n"
            "    def step(self):\n        self.it += 1\n"
            "        for g, lr in zip(self.opt.param_groups, [0.1]):\n"
            "            g['lr'] = lr * self.factor()\n"
        ),
        "np.power(1 - 11 / 10, 0.9)",
    ),
    "a schedule of two methods": (
        SCHEDULE.format(
            "    def done(self):\n        return self.it / self.most\n"
            "    def rate(self):\n        left = 1 - self.done()\n        return np.sqrt(left)\n"
            "    def step(self):\n        self.it += 1\n"
            "        self.opt.param_groups[0]['lr'] = float(self.rate())\n"
        ),
        "look at how the learning rate is computed: np.sqrt(",
    ),
}

TWINS = {
    "a mask of a program": (
        "s = torch.randn(4, 4).masked_fill(torch.eye(4).bool(), float('-inf'))\n"
        "nn.Linear(4, 2)(s).mean().backward()\n",
        "behind",
    ),
    "a reduction that begins with numbers": (
        f"{EDGES}x[2] = math.inf\nagg = torch.zeros(6, 3)\n"
        "agg = agg.scatter_reduce(0, to[:, None].expand(6, 3), x, reduce='amax')\n"
        "print((agg - agg).sum())\n",
        "nothing into some rows",
    ),
    "a weight that is normalised": (
        "w = nn.Parameter(torch.zeros(3, 4))\nn = w / w.abs().amax(1, keepdim=True)\n"
        "(torch.randn(5, 4) @ n.t()).mean().backward()\n",
        "bound the scale",
    ),
    "a variance that rounding has made negative": (
        "v = torch.full((3, 4), 0.5, requires_grad=True)\n"
        "torch.sqrt(1 - (v * 1.0000001).pow(2).sum(1)).sum().backward()\n",
        "unit ball",
    ),
    "what data leave of a variance": (
        "x = torch.linspace(0, 1, 8)[:, None]\nk = torch.exp(-((x - x.t()) ** 2))\n"
        "left = torch.linalg.cholesky(k + 1e-3 * torch.eye(8))\n"
        "v = torch.linalg.solve_triangular(left, k * 1.1, upper=False)\n"
        "var = 1 - (v**2).sum(0)\nprint(var.sqrt().sum().item())\n",
        "unit ball",
    ),
    "a probability above 1": (
        "p = torch.tensor([0.3, 1.2], requires_grad=True)\ntorch.log(1 - p).sum().backward()\n",
        "unit ball",
    ),
    "the exponential of growth alone": (
        f"{TIMES}grow = torch.exp(beta * t)\n(alpha * grow).sum().backward()\n",
        "combine the exponents",
    ),
    "a sum whose logarithm is taken": (
        "x = torch.randn(3, 4, requires_grad=True) * 1e3\nx.exp().sum(1).log().mean().backward()\n",
        "logcumsumexp",
    ),
    "equal eigenvalues of other matrices": (
        "a = torch.eye(4, requires_grad=True)\ntorch.linalg.eigh(a * 2)[1][0].sum().backward()\n",
        "padded",
    ),
    "a tanh with its own backward": (
        "class Own(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return F.softplus(x)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        x, = ctx.saved_tensors\n        e = torch.exp(x)\n"
        "        return g * (e - 1) / (1 + e)\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lin = nn.Linear(2, 3)\n    def forward(self, x):\n"
        "        return Own.apply(self.lin(x) * 400)\n"
        "Net()(torch.randn(6, 2)).sum().backward()\n",
        "sigmoid",
    ),
    "a rounded ratio to the largest of others": (
        "w, other = torch.ones(3, 4, requires_grad=True), torch.zeros(3, 4)\n"
        "(w / other.abs().amax(1, keepdim=True)).round().sum().backward()\n",
        "all that is to be rounded",
    ),
    "p log p": (
        "p = torch.tensor([0.0, 0.4, 0.6])\nprint((p * p.log()).sum())\n",
        "keep 0 out of",
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
