"""What ``fxguard run`` proposes first: the repair that a program needs, in its own words.

Each kind of fault is written in several ways, and has a twin which looks like it and needs
something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fxguard.source.pure_numbers import bad_part

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
    "a mixture by expectation and maximization": (
        "x = torch.cat([torch.randn(30), torch.full((20,), 9.0)])\n"
        "mu, var = torch.tensor([0.0, 9.0]), torch.ones(2)\n"
        "for _ in range(9):\n"
        "    d = x[:, None] - mu\n"
        "    logp = -0.5 * (d ** 2 / var + torch.log(var))\n"
        "    r = logp.softmax(1)\n"
        "    n = r.sum(0)\n"
        "    mu = (r * x[:, None]).sum(0) / n\n"
        "    var = (r * (x[:, None] - mu) ** 2).sum(0) / n\n"
        "print(mu, var)\n",
        "add a floor in the line that makes `var` (script.py:12)",
    ),
}

SIGNS = {
    "a variance that is a parameter": (
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.s2 = torch.nn.Parameter(torch.tensor([0.01, 1.0]))\n"
        "    def nll(self, x, i):\n"
        "        v = self.s2[i]\n"
        "        return (torch.log(v) + x ** 2 / v).mean()\n"
        "m = M()\no = torch.optim.SGD(m.parameters(), 0.05)\n"
        "x, i = torch.randn(6) * 0.0, torch.tensor([0, 0, 1, 1, 0, 1])\n"
        "for _ in range(9):\n    o.zero_grad()\n    m.nll(x, i).backward()\n    o.step()\n",
        "keep self.s2 positive, by softplus or exp",
    ),
    "generalized mean pooling": (
        "x = torch.randn(2, 3, 4, 4)\np = torch.nn.Parameter(torch.tensor(3.0))\n"
        "y = (x ** p).mean((2, 3)) ** (1 / p)\ny.sum().backward()\n",
        "clamp what the first power reads, x.clamp(min=1e-6)",
    ),
}

DIVISORS = {
    "the smaller of both": (
        "size = torch.tensor([0.0, 0.5, 9.0])\nw = torch.clamp(size, max=5.0) / size\nprint(w)\n",
        "take (c / size).clamp(max=1)",
    ),
    "a row without a length": (
        "x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])\nu = x / x.norm(dim=1, keepdim=True)\n"
        "print(u)\n",
        "take F.normalize(x, dim=dim)",
    ),
    "gradients that are clipped each": (
        "g = torch.tensor([[0.0, 0.0], [3.0, 4.0]])\nn = torch.linalg.norm(g, dim=1)\n"
        "g = g * (1.0 / n)[:, None]\nprint(g)\n",
        "add an eps to the norm, n + 1e-6",
    ),
    "one advantage": (
        "adv = torch.tensor([0.5])\nadv = (adv - adv.mean()) / (adv.std() + 1e-8)\nprint(adv)\n",
        "take std of more than one element (if adv.numel() > 1)",
    ),
    "words that are counted": (
        "n = torch.tensor([[0.0, 3.0], [1.0, 2.0]], dtype=torch.float64)\nx = n.log()\n"
        "print(x.sum())\n",
        "of counts take log1p(n), or log(n.clamp(min=1))",
    ),
    "words that never occur": (
        "df = torch.tensor([0.0, 3.0, 8.0])\nidf = torch.log(10 / df)\nprint(idf * 2)\n",
        "clamp(min=1)",
    ),
}

OVERFLOWS = {
    "descent with too large a step": (
        "x = torch.randn(50, 3)\ny = x @ torch.tensor([1.0, -2.0, 0.5])\n"
        "w, learning_rate = torch.zeros(3), 3.0\n"
        "for i in range(200):\n    err = x @ w - y\n    grad = 2 * x.T @ err / len(x)\n"
        "    w = w - learning_rate * grad\n"
        "print((err ** 2).mean())\n",
        "lower the learning rate, learning_rate (script.py:10)",
    ),
    "descent by autograd": (
        "x = torch.randn(50, 3) * 9\ny = x.sum(1)\n"
        "w, lr = torch.zeros(3, requires_grad=True), 0.5\n"
        "for i in range(90):\n    loss = ((x @ w - y) ** 2).mean()\n    loss.backward()\n"
        "    with torch.no_grad():\n        w -= lr * w.grad\n        w.grad.zero_()\n",
        "lower the learning rate, lr (script.py:11)",
    ),
    "factors that are updated in place": (
        "U, V = torch.randn(9, 4), torch.randn(8, 4)\nR = torch.rand(9, 8) * 5\neta = 0.5\n"
        "for i in range(90):\n    e = R - U @ V.T\n    dU, dV = e @ V, e.T @ U\n"
        "    U.add_(dU, alpha=eta)\n    V.add_(dV, alpha=eta)\n    print(float((e ** 2).sum()))\n",
        "lower the learning rate, eta (script.py:",
    ),
    "pixels": (
        "enc, dec = torch.nn.Linear(6, 4), torch.nn.Linear(2, 6)\n"
        "class V(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.e, self.d = enc, dec\n"
        "    def forward(self, img):\n"
        "        mu, logvar = self.e(img).chunk(2, 1)\n"
        "        return self.d(mu + torch.exp(logvar)), logvar\n"
        "m = V()\nimg = torch.randint(0, 256, (64, 6)).float()\nimg[0] = 255\n"
        "out, logvar = m(img)\nloss = F.mse_loss(out, img) + logvar.exp().mean()\n"
        "loss.backward()\n",
        "divide img by 255: linear (script.py:10) reads numbers up to 255",
    ),
    "assignments by Sinkhorn": (
        "s = torch.randn(16, 5) * 40\nq = torch.exp(s / 0.05).t()\nq = q / q.sum()\n"
        "for _ in range(3):\n    q = q / q.sum(1, keepdim=True)\n"
        "    q = q / q.sum(0, keepdim=True)\n"
        "print(q.t())\n",
        "normalise in logarithms",
    ),
}

EXPOSURES = {
    "an offset": (
        "n = torch.tensor([30.0, 0.0, 12.0])\nx = torch.randn(3, 2)\n"
        "w = torch.zeros(2, requires_grad=True)\noffset = torch.log(n)\n"
        "eta = x @ w + offset\nloss = (eta.exp() - eta * 2).mean()\nloss.backward()\n",
        "drop the rows where n is 0 (1 of 3), or take log(n.clamp(min=1))",
    ),
    "a rate of events": (
        "days = torch.tensor([4.0, 0.0, 2.0, 0.0])\ny = torch.tensor([1.0, 0.0, 3.0, 0.0])\n"
        "rate = torch.log(y + 1) - days.log()\nprint(rate.mean())\n",
        "drop the rows where days is 0 (2 of 4), or take log(days.clamp(min=1))",
    ),
    "an offset of a model": (
        "net = torch.nn.Linear(2, 1)\nn = torch.tensor([3.0, 0.0])\nx = torch.randn(2, 2)\n"
        "mu = net(x).squeeze(1) * 2 - n.log()\nloss = mu.sum()\n"
        "loss.backward()\n",
        "drop the rows where n is 0 (1 of 2), or take log(n.clamp(min=1))",
    ),
    "a feature of a layer": (
        "net = torch.nn.Linear(2, 1)\nn = torch.tensor([3.0, 0.0])\n"
        "x = torch.stack([n.log(), torch.ones(2)], 1)\nprint(net(x).sum())\n",
        "of counts take log1p(n)",
    ),
}

STEEP = {
    "two poles, one of them masked": (
        "t = torch.tensor([0.0, 1.0, 2.0])\ns = torch.tensor(0.5, requires_grad=True)\n"
        "z = t / s.exp()\nh = torch.where(t > 0, torch.log(s + 1) + s * torch.log(z), 0 * t)\n"
        "(h.sum() + (z ** s).sum()).backward()\n",
        "keep z away from 0 where it is made (script.py:6), by clamp(min=1e-6): pow (script.py:8)",
    ),
    "a root and a power of one length": (
        "x = torch.zeros(3, 2, requires_grad=True)\nd = (x * 2).sum(1)\n"
        "a = d.sqrt() * 2\nb = d ** 0.3\n(a + b).sum().backward()\n",
        "keep d away from 0 where it is made (script.py:5), by clamp(min=1e-6)",
    ),
    "a logarithm and a root": (
        "x = torch.tensor([0.0, 2.0], requires_grad=True)\nr = x * 3\nm = r > 0\n"
        "y = torch.where(m, r.log() * 2 + r, r) + r.sqrt()\ny.sum().backward()\n",
        "keep r away from 0 where it is made (script.py:5), by clamp(min=1e-6): ",
    ),
}

ROOT = "sqrt({}): at 0 the derivative is infinite{} (advice)"
TOO = ", and by roundings this difference may be below 0, too"
CDIST = "; torch.cdist has a gradient of 0 there"
POINTS = "x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)\nq = (x * x).sum(1)\n"

ROOTS_OF_DIFFERENCES = {
    "distances of pairs": (
        POINTS + "d = q[:, None] + q[None] - 2 * x @ x.T\nd.sqrt().sum().backward()\n",
        ROOT.format("d.clamp(min=1e-12)", TOO + CDIST),
    ),
    "distances of pairs, bounded": (
        POINTS + "d = (q[:, None] + q[None] - 2 * (x @ x.T)).clamp(min=0)\n"
        "d.sqrt().sum().backward()\n",
        ROOT.format("d.clamp(min=1e-12)", CDIST),
    ),
    "a variance, bounded": (
        POINTS + "var = ((q * 0 + 4) - (q * 0 + 2) ** 2).clamp(min=0)\n"
        "(x.sum(1) * var.sqrt()).sum().backward()\n",
        ROOT.format("var.clamp(min=1e-12)", ""),
    ),
    "a difference that nobody bounds": (
        POINTS + "rest = q - (q.detach() + 0)\nrest.sqrt().sum().backward()\n",
        ROOT.format("rest.clamp(min=1e-12)", TOO),
    ),
}

VANISHED = {
    "a Gibbs kernel": (
        "C = torch.rand(6, 6) + 0.1\nC[2] = 3\nK = torch.exp(-C / 0.01)\n"
        "a, v = torch.ones(6) / 6, torch.ones(6)\n"
        "for _ in range(9):\n    u = a / (K @ v)\n    v = a / (K.T @ u)\nprint((u * v).sum())\n",
        "exp (script.py:6) made 0 of -300: work in logs there (logsumexp), as float32 holds "
        "exp down to exp(-103)",
    ),
    "a mixture by hand": (
        "x = torch.tensor([0.0, 1.0, 90.0])\nmu, w = torch.tensor([0.0, 1.0]), torch.ones(2) / 2\n"
        "pdf = torch.exp(-0.5 * (x[:, None] - mu) ** 2) / math.sqrt(2 * math.pi)\n"
        "print((pdf @ w).log().sum())\n",
        "exp (script.py:6) made 0 of -4050: work in logs there (logsumexp)",
    ),
    "an average by a kernel": (
        "x, y = torch.linspace(0, 1, 8), torch.randn(8)\nq = torch.tensor([0.5, 9.0])\n"
        "K = torch.exp(-(q[:, None] - x) ** 2 / 0.1)\nprint((K @ y) / K.sum(1))\n",
        "take softmax of what exp (script.py:6) reads as weights",
    ),
    "scales of distances": (
        "x = torch.tensor([0.0, 0.1, 30.0])\nD = (x[:, None] - x) ** 2 + 200 * torch.eye(3)\n"
        "W = torch.exp(-D)\nd = W.sum(1)\nprint((W * d.rsqrt()).sum())\n",
        "exp (script.py:6) made 0 of -900: work in logs there",
    ),
}

CANCELLED = {
    "a Kalman filter": (
        "P, R = torch.eye(2) * 1e6, 1e-6\nH, A = torch.tensor([[1.0, 0.0]]), torch.eye(2)\n"
        "A[0, 1] = 0.1\nfor _ in range(30):\n    P = A @ P @ A.T + 1e-7 * torch.eye(2)\n"
        "    S = H @ P @ H.T + R\n    print(torch.log(S).sum())\n"
        "    P = (torch.eye(2) - P @ H.T / S @ H) @ P\n",
        "`S` is what roundings of numbers up to 9.9e+05 leave in matmul (script.py:11): compute it "
        "in float64, or carry a Cholesky factor of the covariance (a square-root form); Joseph's "
        "form alone may turn negative in float32, too",
    ),
    "a posterior variance": (
        "k = torch.full((4,), 400.0)\nv = torch.tensor([20.000001, 1.0, 2.0, 20.00001])\n"
        "var = k - v * v.abs()\nprint(var.sqrt())\n",
        "`var` is what roundings of numbers up to 400 leave in sub (script.py:6): compute it in "
        "float64",
    ),
    "a residual of a projection": (
        "n = torch.tensor(5000.0)\np = torch.tensor([5000.001, 10.0])\nrest = n - p\n"
        "print(torch.log(rest))\n",
        "`rest` is what roundings of numbers up to 5000 leave in sub (script.py:6)",
    ),
}

FEW = "take (n - 1){} a count less one is 0 where the count is 1; "
APART = FEW + "a group of one has no deviation, so treat it apart, such as with a deviation of 1"
GROUPS = "i = torch.tensor([0, 0, 1, 2, 2])\nn = torch.zeros(3).index_add_(0, i, torch.ones(5))\n"

LESS_ONE = {
    "a deviation of each group": (
        GROUPS + "x = torch.randn(5, 2)\nm = torch.zeros(3, 2).index_add_(0, i, x) / n[:, None]\n"
        "d = torch.zeros(3, 2).index_add_(0, i, (x - m[i]) ** 2)\n"
        "std = torch.sqrt(d / (n - 1)[:, None])\nprint(std.sum())\n",
        APART.format("[:, None].clamp(min=1):"),
    ),
    "a variance under a mask": (
        "mask = torch.tensor([1.0, 0.0, 0.0])\nx = torch.randn(3)\nn = mask.sum()\n"
        "mean = (x * mask).sum() / n\n"
        "var = (mask * (x - mean) ** 2).sum() / (n - 1)\nprint(var)\n",
        APART.format(".clamp(min=1):"),
    ),
    "a variance of counts of integers": (
        "n = torch.bincount(torch.tensor([0, 0, 1, 2, 2]))\nx = torch.rand(3).square()\n"
        "print((x * n / (n - 1)).sqrt())\n",
        APART.format(".clamp(min=1):"),
    ),
    "a count less one that has a name": (
        "lengths = torch.tensor([3, 1])\nn = lengths - 1\nx = torch.zeros(2) / n\nprint(x)\n",
        "take n.clamp(min=1): a count less one is 0 where the count is 1; or treat a group of one",
    ),
    "places in sentences": (
        "n = torch.tensor([3, 1])\nprint(torch.arange(2) / (n - 1))\nx = torch.zeros(2) / (n - 1)\n"
        "print(x)\n",
        FEW.format(".clamp(min=1):") + "or treat a group of one apart",
    ),
}

WRITTEN = {
    "an unbiased variance of one row": (
        "x = torch.randn(1, 3)\nc = x - x.mean(0)\nprint(c.pow(2).sum(0) / (x.shape[0] - 1))\n",
        "divide by x.shape[0] in place of x.shape[0] - 1",
    ),
    "a mean over no steps": (
        "total, steps = torch.zeros(3), 0\nprint(total / steps)\n",
        "look at what makes steps 0, a number of the program; if it counts, divide by max(steps",
    ),
    "a mean over positives": (
        "z, y = torch.randn(4, 3), torch.tensor([0, 0, 1, 2])\n"
        "same = (y[:, None] == y[None, :]) & ~torch.eye(4).bool()\n"
        "log_p = (z @ z.T).log_softmax(1)\n"
        "print((same * log_p).sum(dim=1) / same.sum(dim=1))\n",
        "take same.sum(dim=1).clamp(min=1)",
    ),
    "a level of integers": (
        "pcm = (torch.linspace(-1, 1, 300) * 4000).to(torch.int16)\n"
        "pcm = pcm[pcm.abs() > 190][:20] * 0 + 182\n"
        "power = (pcm[:1] * pcm[:1]).float()\n"
        "print(torch.log10(power / 32768))\n",
        "square pcm[:1] as floating-point numbers, pcm[:1].float() (script.py:6)",
    ),
    "a store that runs dry": (
        "s, k = torch.full((2,), 3.0), 0.9\n"
        "for t in range(6):\n"
        "    s = s + 1.0\n"
        "    q = k * s ** 1.5\n"
        "    s = s - q\n"
        "print(s)\n",
        "keep s from falling below 0 where it is lowered (script.py:8)",
    ),
    "states that cannot be reached": (
        "w = torch.zeros(4, requires_grad=True)\n"
        "a = torch.tensor([0.0] + [float('-inf')] * 3) + w\n"
        "for t in range(2):\n"
        "    moved = torch.roll(a, 1) + torch.tensor([-torch.inf, 0, 0, 0])\n"
        "    a = torch.logsumexp(torch.stack([a, moved]), 0) + w\n"
        "(-a[1]).backward()\n",
        "begin with torch.finfo(torch.float32).min in place of -inf for what cannot be reached",
    ),
    "a power of a number that is 0, by its logarithm": (
        "days, shape = torch.arange(6.0), torch.tensor([2.4, 1.0, 3.1])\n"
        "log_density = (shape[:, None] - 1) * torch.log(days)[None] - days\n"
        "print(log_density.exp().sum().item())\n",
        "take xlogy(p, q) instead of p * log(q): it is 0 where p is",
    ),
    "logarithms as targets": (
        "q = torch.zeros(2, 3, requires_grad=True).log_softmax(1)\n"
        "log_p = torch.tensor([[0.0, 0.0, -torch.inf]] * 2).log_softmax(1)\n"
        "F.kl_div(q, log_p, log_target=True).backward()\n",
        "log_p.exp() with log_target=False",
    ),
    "a norm of a weight of zeros": (
        "layer = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))\n"
        "torch.nn.init.zeros_(layer.weight_orig)\n"
        "torch.nn.Sequential(layer)(torch.randn(2, 3)).sum().backward()\n",
        "initialise this weight with numbers that are not 0",
    ),
    "a sampler at the end of a schedule": (
        "net = torch.nn.Linear(2, 2)\n"
        "signal = torch.linspace(1, 0, 6).sqrt()\n"
        "noise = (1 - signal**2).sqrt()\n"
        "with torch.no_grad():\n"
        "    x = torch.randn(3, 2)\n"
        "    for t in (5, 3, 1):\n"
        "        x0 = (x - noise[t] * net(x)) / signal[t]\n"
        "        x = signal[t - 1] * x0 + noise[t - 1] * net(x)\n"
        "print(net(x))\n",
        "keep signal away from 0 where it is made (script.py:5)",
    ),
    "a sample of tanh": (
        "from torch.distributions import Normal, TanhTransform, TransformedDistribution as T\n"
        "mean = torch.zeros(3, requires_grad=True)\n"
        "act = torch.tensor([0.1, 1.0, 0.2])\n"
        "loss = -T(Normal(mean, 1.0), [TanhTransform()]).log_prob(act).sum()\nloss.backward()\n",
        "act.clamp(-1 + 5e-07, 1 - 5e-07)",
    ),
}
HIDDEN = {
    "a likelihood of missing targets": (
        "net = torch.nn.Linear(3, 2)\nx, target = torch.randn(6, 3), torch.randn(6)\n"
        "target[2] = math.nan\nmu, raw = net(x).unbind(1)\nsigma = F.softplus(raw) + 0.1\n"
        "seen = ~torch.isnan(target)\n"
        "z = (target - mu) / sigma\nnll = 0.5 * z ** 2 + sigma.log()\n"
        "nll = torch.where(seen, nll, 0.0)\n(nll.sum() / seen.sum()).backward()\n",
        "give sub (script.py:10) a harmless number in place of NaN, "
        "torch.where(seen, target, 0); where (script.py:12) hides only the result",
    ),
    "squares that masked_fill hides": (
        "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
        "y[4] = math.inf\nbad = y.isinf()\nerr = (net(x)[:, 0] - y) ** 2\n"
        "err = err.masked_fill(bad, 0.0)\nerr.mean().backward()\n",
        "in place of inf, y.masked_fill(bad, 0)",
    ),
    "squares of which a part is taken": (
        "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
        "y[4] = math.nan\nerr = (net(x)[:, 0] - y) ** 2\nerr[~y.isnan()].mean().backward()\n",
        "put a mask before the arithmetic, too: give sub (script.py:7) a harmless number in place "
        "of NaN; getitem (script.py:8) hides only the result",
    ),
    "a likelihood of saturated actions": (
        "net = torch.nn.Linear(3, 1)\no = torch.randn(6, 3)\n"
        "act = torch.tensor([[0.1], [1.0], [0.3], [-1.0], [0.2], [0.0]])\n"
        "u = torch.atanh(act)\nmu = net(o)\ninside = -0.5 * (u - mu) ** 2\n"
        "lp = torch.where(act.abs() >= 0.999, -mu.abs(), inside)\n(-lp.mean()).backward()\n",
        "torch.where(act.abs() >= 0.999, 0, u) (`u` comes from script.py:7: u = torch.atanh(act))",
    ),
    "an activation by hand": (
        "w = torch.tensor([1.0, 95.0, -2.0], requires_grad=True)\nx = w * 1\n"
        "y = torch.where(x > 0, x, 2 * (torch.exp(x) - 1))\ny.sum().backward()\n",
        "give exp (script.py:6), which made inf, torch.where(x > 0, 0, x)",
    ),
    "a loss whose NaN is replaced": (
        "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
        "y[4] = math.nan\nloss = torch.nan_to_num((net(x)[:, 0] - y) ** 2).mean()\n"
        "loss.backward()\n",
        "give sub (script.py:7) a harmless number in place of NaN; nan_to_num hides only the "
        "result: the backward is 0 * NaN",
    ),
}
FACTORED = {
    "an excitation": (
        "t = torch.linspace(0, 60, 50)\nbeta = torch.tensor(2.0, requires_grad=True)\n"
        "grow = torch.exp(beta * t)\npast = torch.cumsum(grow, 0) - grow\n"
        "lam = past * torch.exp(-beta * t) + 1\nlam.log().sum().backward()\n",
        "what is made of exp (script.py:6) is multiplied by exp of minus the same exponent, in exp "
        "(script.py:8): take exp of differences",
    ),
    "an excitation that is divided": (
        "t = torch.linspace(0, 60, 50)\nbeta = torch.tensor(2.0, requires_grad=True)\n"
        "grow = torch.exp(beta * t)\npast = torch.cumsum(grow, 0) - grow\n"
        "lam = past / grow + 1\nlam.log().sum().backward()\n",
        "what is made of exp (script.py:6) is divided by it, in div (script.py:8)",
    ),
    "a linear attention with decays": (
        "g = torch.full((1, 40), -3.0).cumsum(1)\nq = torch.randn(1, 40, requires_grad=True)\n"
        "k = torch.randn(1, 40)\ns = ((k * (-g).exp()).cumsum(1) * q) * g.exp()\n"
        "s.sum().backward()\n",
        "combine the exponents before exp",
    ),
    "a kernel of differences as a product": (
        "x = torch.linspace(0, 99, 9)\nw = torch.tensor(1.0, requires_grad=True)\n"
        "a = w * x\nleft = torch.exp(-a)[:, None]\nright = torch.exp(a)[None]\n"
        "K = right * left\nK.sum().backward()\n",
        "combine the exponents before exp",
    ),
}
OUTSIDE = {
    "sound whose smallest number has no magnitude": (
        "pcm = torch.tensor([5, -32768, 7], dtype=torch.int16)\n"
        "mag = pcm.abs().float() / 32768.0\nprint(torch.log1p(255.0 * mag))\n",
        "make pcm floating-point numbers before abs, pcm.float().abs() (script.py:5)",
    ),
    "a level of bytes": (
        "q = torch.tensor([5, -128, 7], dtype=torch.int8)\nlevel = torch.abs(q)\n"
        "level = level.to(torch.float32)\nprint(torch.log(level))\n",
        "make q floating-point numbers before abs, q.float().abs() (script.py:5)",
    ),
    "a root of a magnitude": (
        "n = torch.tensor([5, -2147483648], dtype=torch.int32)\nprint((n.abs() / 4).sqrt())\n",
        "make n floating-point numbers before abs",
    ),
    "a stretch of positions": (
        "n = torch.tensor(25)\nstretch = 2.0 * n / 64 - 1.0\nprint(100 * stretch ** 1.2)\n",
        "see why stretch is -0.2188 in sub (script.py:5), 0.7812 - 1: keep what it is computed of",
    ),
    "a rest to a power": (
        "t = torch.tensor([0.5, 1.25])\nrest = 1.0 - t\nprint(rest ** 0.7)\n",
        "see why rest is -0.25",
    ),
    "a threshold": (
        "x = torch.tensor([2.0, 0.5])\ny = (x - 1.5) ** 2.5\nprint(y)\n",
        "0.5 - 1.5: keep what it is computed of within its range",
    ),
}
DENOISER = (
    "class N(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.l = torch.nn.Linear(2, 2)\n    def forward(self, x, s):\n"
    "        return self.l(x) + %s\nnet = N()\n"
)
AT_THE_END = {
    "the logarithm of a noise level": (
        DENOISER % "s.log()[:, None]" + "with torch.no_grad():\n    for s in (1.0, 0.5, 0.0):\n"
        "        y = net(torch.randn(3, 2), torch.full((3,), s))\nprint(y)\n",
        "leave out the call at script.py:13, which gives s = 0",
    ),
    "a quotient by a time": (
        DENOISER
        % "x / s"
        + "times = torch.linspace(1, 0, 3)\nwith torch.no_grad():\n    for t in times:\n"
        "        y = net(torch.randn(3, 2), t)\nprint(y)\n",
        "leave out the call at script.py:14, which gives s = 0",
    ),
    "a level that is moved": (
        DENOISER
        % "torch.log(s.view(-1, 1).float())"
        + "with torch.no_grad():\n    y = net(torch.randn(3, 2), torch.zeros(3).double())\n"
        "print(y)\n",
        "leave out the call at script.py:12, which gives s = 0",
    ),
}
IN_HALF = "with torch.autocast('cpu', torch.float16):\n    "
UNSCALED = {
    "sound of 24 bits": (
        "net = torch.nn.Sequential(torch.nn.Conv1d(1, 4, 9, bias=False), torch.nn.ReLU())\n"
        "wav = torch.randn(8, 200).clamp(-1, 1)\nwav[3] = wav[3] * 8388607\n"
        "wav = wav.unsqueeze(1)\n" + IN_HALF + "y = net(wav)\ny.float().mean().backward()\n",
        "or if these are integers of 24 bits, by 2**23: conv1d",
    ),
    "prices": (
        "net = torch.nn.Linear(2, 1)\nx = torch.tensor([[1.0, 3e5], [1.0, 2e5]])\n"
        + IN_HALF
        + "y = net(x)\ny.float().mean().backward()\n",
        "linear (script.py:7) reads numbers up to 3e+05",
    ),
    "sound of 16 bits in a model of halves": (
        "net = torch.nn.Linear(160, 4).half()\nwav = torch.full((2, 160), 16000.0)\n"
        "wav = wav * net.weight[0].sign().detach()\n"
        "wav = wav.half().view(2, 160)\ny = net(wav)\ny.float().mean().backward()\n",
        "or if these are integers of 16 bits, by 2**15",
    ),
}
HALF = "torch.bfloat16"
# 1 - x of what has been rounded to 1.
ROUNDED = {
    "an average's correction": (
        f"decay = torch.tensor(0.999, dtype={HALF})\n"
        f"s = torch.zeros(3, dtype={HALF})\n"
        "for step in range(1, 3):\n"
        "    s.mul_(decay).add_((1 - decay) * torch.rand(3))\n"
        "correction = 1 - decay ** 2\nprint((s / correction).sum().item())\n",
        "keep `decay` in float32, or as a number of Python: bfloat16 holds nothing between 0.9961",
    ),
    "a correction of Adam": (
        "class Own:\n"
        "    def __init__(self):\n"
        "        self.beta = torch.tensor(0.9999).half()\n"
        "    def unbiased(self, v, t):\n"
        "        return v / (1 - self.beta ** t)\n"
        "print(Own().unbiased(torch.rand(3).half(), 1).sum().item())\n",
        "keep `self.beta` in float32",
    ),
    "a probability": (
        f"p = torch.sigmoid(torch.tensor([8.0, 9.0], dtype={HALF}))\n"
        "odds = p / (1 - p)\nprint(odds.sum().item())\n",
        "keep `p` in float32, or as a number of Python: bfloat16 holds nothing between 0.9961",
    ),
}

MASKED = (
    "z = torch.randn(3, 4, requires_grad=True)\n"
    "legal = torch.tensor([True, True, False, True])\n"
    "logp = z.masked_fill(~legal, -math.inf).log_softmax(-1)\n"
)
# Products with -inf, of which a where leaves out what is NaN.
CHOSEN = {
    "an entropy of legal actions": (
        f"{MASKED}plogp = logp.exp() * logp\n"
        "h = -torch.where(legal, plogp, torch.zeros_like(plogp)).sum(-1)\nh.mean().backward()\n",
        "take torch.where(legal, logp, 0) in place of logp in the product",
    ),
    "the same the other way round": (
        f"{MASKED}p = logp.exp()\nplogp = logp * p\n"
        "h = torch.where(~legal, torch.zeros(3, 4), plogp).sum()\nh.backward()\n",
        "take torch.where(~legal, 0, logp) in place of logp in the product",
    ),
}
# Several tensors joined, of which another one than the first is negative.
JOINED = {
    "a recurrence": (
        "a, s, out = torch.tensor(-0.5, requires_grad=True), torch.tensor(1.0), []\n"
        "for _ in range(4):\n    out.append(s)\n    s = a + 0.2 * s\n"
        "s2 = torch.stack(out)\nloss = torch.log(s2).sum()\nloss.backward()\n",
        "see why s2 is negative in add (script.py:7)",
    ),
    "rows": (
        "w = torch.tensor([0.5, -0.25], requires_grad=True)\n"
        "x = torch.cat([w.exp(), w * 3])\n"
        "loss = x.sqrt().sum()\nloss.backward()\n",
        "see why x is negative in mul (script.py:5)",
    ),
}

# Readings out of range, which are infinite.
INFINITE = {
    "neighbours": (
        "ranges = torch.tensor([1.0, math.inf, math.inf, 2.0])\n"
        "jumps = (ranges[1:] - ranges[:-1]).clamp(-2, 2)\nprint(jumps.sum().item())\n",
        "such as ranges.clamp(max=...)",
    ),
    "pairs of distances": (
        "d = torch.tensor([[1.0, 2.0], [math.inf, math.inf]])\n"
        "gap = d[:, 0].sub(d[:, 1])\nprint(gap.mean().item())\n",
        "such as d.clamp(max=...)",
    ),
}
# A logarithm of what a bound would make 0.
KEPT_POSITIVE = {
    "a variance": (
        "a, x = torch.tensor(-0.5, requires_grad=True), torch.rand(5)\n"
        "v = (0.2 + a) * x.mean()\nloss = torch.log(v) + 1 / v\nloss.backward()\n",
        "negative in mul (script.py:5), and keep it positive there, by softplus or exp",
    ),
}

# Densities that vanish in float32, in a program with large numbers and no loss scale.
SCALELESS = {
    "a prior of two scales": (
        "net = torch.nn.Linear(3, 1)\n"
        "def density(w, s):\n"
        "    return torch.exp(-0.5 * math.log(2 * math.pi) - math.log(s) - w ** 2 / (2 * s ** 2))\n"
        "x = torch.randn(8, 3)\nw = net.weight\n"
        "with torch.no_grad():\n    w.fill_(0.1409)\n"
        "prior = torch.log(0.5 * density(w, 0.01) + 0.5 * density(w, 0.0025)).sum()\n"
        "loss = net(x).pow(2).mean() - prior / 100\nloss.backward()\n",
        "work with logarithms: logsumexp",
    ),
}
DEEP = {
    "weights by costs that many operations made": (
        "cost = torch.rand(8)\nfor _ in range(200):\n    cost = cost * 1.02 + 20.0\n"
        "score = torch.exp(-cost)\nweight = score / score.sum()\nprint(weight.sum().item())\n",
        "take softmax(-cost, dim)",
    ),
}

FIRST = {
    **SCALELESS,
    **DEEP,
    **KEPT_POSITIVE,
    **INFINITE,
    **CHOSEN,
    **JOINED,
    **ROUNDED,
    **AT_THE_END,
    **OUTSIDE,
    **UNSCALED,
    **FACTORED,
    **HIDDEN,
    **WEIGHED,
    **PRODUCTS,
    **SPREADS,
    **SIGNS,
    **DIVISORS,
    **OVERFLOWS,
    **EXPOSURES,
    **STEEP,
    **ROOTS_OF_DIFFERENCES,
    **VANISHED,
    **CANCELLED,
    **LESS_ONE,
    **WRITTEN,
}

# What is not said of these, and what is.
TWINS = {
    "probabilities of which one is certain": (
        "start = torch.tensor([1.0, 0.0, 0.0])\nprint(start.log().sum().item())\n",
        "clamp(min=1)",
    ),
    "infinities of two variables": (
        "a, b = torch.tensor([1.0, math.inf]), torch.tensor([2.0, math.inf])\n"
        "print((a - b).sum().item())\n",
        "of your data's range",
    ),
    "a mask of ones in few digits": (
        f"keep = (torch.ones(2, 3) > 0).to({HALF})\n"
        f"x = torch.rand(2, 3).to({HALF})\n"
        "print((x / (1 - keep)).sum())\n",
        "holds nothing between",
    ),
    "a power of 1 in float32": (
        "one = torch.tensor(1.0)\nprint((torch.rand(3) / (1 - one ** 3)).sum())\n",
        "holds nothing between",
    ),
    "a level that is 0 in one sample": (
        DENOISER % "s.log()[:, None]"
        + "print(net(torch.randn(3, 2), torch.tensor([0.3, 0.0, 0.25])))\n",
        "leave out the call",
    ),
    "a level that the model makes 0": (
        DENOISER % "(s * 0).log()[:, None]"
        + "print(net(torch.randn(3, 2), torch.tensor([0.3, 0.5, 0.25])))\n",
        "leave out the call",
    ),
    "a magnitude less a threshold": (
        "pcm = torch.tensor([5, -300, 7], dtype=torch.int16)\n"
        "mag = pcm.abs().float() - 9\nprint(torch.log(mag))\n",
        "before abs",
    ),
    "a magnitude with its sign": (
        "pcm = torch.tensor([5, -300, 7], dtype=torch.int16)\n"
        "mag = -pcm.abs().float() / 9\nprint(torch.sqrt(mag))\n",
        "before abs",
    ),
    "a root of a difference by a number": (
        "x = torch.tensor([2.0, 0.5])\nprint((x - 1.5).sqrt())\n",
        "only hides it",
    ),
    "a power of a difference of two tensors": (
        "x = torch.tensor([2.0, 0.5])\nprint((x - x.mean()) ** 0.3)\n",
        "only hides it",
    ),
    "weights that are large, of data that is scaled": (
        "net = torch.nn.Linear(2, 1)\ntorch.nn.init.constant_(net.weight, 6e4)\n"
        "x = torch.tensor([[1.0, 3.0], [1.0, 2.0]])\n"
        + IN_HALF
        + "y = net(x)\ny.float().mean().backward()\n",
        "scale x",
    ),
    "a second layer that overflows": (
        "net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2, bias=False))\n"
        "torch.nn.init.constant_(net[0].bias, 3e4)\ntorch.nn.init.constant_(net[1].weight, 9.0)\n"
        "x = torch.randn(3, 2)\n" + IN_HALF + "y = net(x)\ny.float().mean().backward()\n",
        "scale",
    ),
    "a hyperbolic cosine by hand": (
        "x = torch.tensor([1.0, 99.0], requires_grad=True) * 1\n"
        "(0.5 * torch.exp(x) + 0.5 * torch.exp(-x)).sum().backward()\n",
        "combine the exponents",
    ),
    "a variance and a precision": (
        "lv = torch.tensor([1.0, 99.0], requires_grad=True) * 1\nd = torch.tensor([1.0, 2.0])\n"
        "(d ** 2 * torch.exp(-lv) + torch.exp(lv)).sum().backward()\n",
        "combine the exponents",
    ),
    "two exponentials that do not cancel": (
        "x = torch.tensor([1.0, 99.0], requires_grad=True) * 1\ny = torch.tensor([1.0, 2.0])\n"
        "(torch.exp(x).cumsum(0) * torch.exp(-y)).sum().backward()\n",
        "combine the exponents",
    ),
    "a missing target that nothing hides": (
        "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
        "y = y / (torch.arange(6) != 4).float()\n((net(x)[:, 0] - y) ** 2).mean().backward()\n",
        "before the arithmetic",
    ),
    "a root whose derivative is infinite": (
        "w = torch.tensor([0.0, 4.0], requires_grad=True)\nx = w * 1\n"
        "torch.where(x > 0, x.sqrt(), 0.0).sum().backward()\n",
        "before the arithmetic",
    ),
    "a distance of 0 that is multiplied by 0": (
        "w = torch.tensor([0.0, 4.0], requires_grad=True)\nx = w * 1\n"
        "(x.sqrt() * torch.tensor([0.0, 1.0])).sum().backward()\n",
        "before the arithmetic",
    ),
    "a missing target that another one joins": (
        "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
        "y = y / (torch.arange(6) != 4).float()\nerr = (net(x)[:, 0] - y) ** 2\n"
        "torch.where(y.isinf(), 0.0, err.roll(1)).mean().backward()\n",
        "before the arithmetic",
    ),
    "a logarithm that another weight multiplies": (
        "p = torch.tensor([0.0, 0.4])\nq = torch.tensor([0.5, 0.5])\nprint((q * p.log()).sum())\n",
        "masked_fill",
    ),
    "a weight that is not 0 there": (
        "n = torch.tensor([0.0, 3.5])\nf = (n / 10) + 1\nprint((f * n.log()).sum())\n",
        "masked_fill",
    ),
    "a short chain of layers": (
        "w = torch.zeros(3, 3)\nx = torch.randn(2, 3)\n"
        "h = torch.relu(x @ w)\nh = torch.relu(h @ w)\nprint(torch.log(h.sum()))\n",
        "at every turn",
    ),
    "a recursion with an activation": (
        "w = torch.zeros(3, 3)\nh = torch.randn(2, 3)\n"
        "for _ in range(9):\n    h = torch.relu(h @ w)\nprint(torch.log(h.sum()))\n",
        "at every turn",
    ),
    "shares of what is 0": (
        "w = torch.relu(-torch.rand(4))\nprint(w / w.sum())\n",
        "softmax",
    ),
    "weights that a mask made 0": (
        "s = torch.randn(2, 3).exp() * torch.tensor([[True] * 3, [False] * 3]).float()\n"
        "print(s / s.sum(1, keepdim=True))\n",
        "became 0",
    ),
    "a divisor that is no norm": (
        "x = torch.zeros(2, 3)\nprint(x / x.abs().sum(1, keepdim=True))\n",
        "normalize",
    ),
    "a column without a spread": (
        "x = torch.tensor([[1.0, 2.0], [1.0, 3.0]])\nprint((x - x.mean(0)) / x.std(0))\n",
        "add a floor",
    ),
    "a power of a difference": (
        "x = torch.tensor([0.2, 0.9])\nprint((x - 0.5) ** 0.3)\n",
        "clamp what",
    ),
    "an ordinary softmax by hand": (
        "s = torch.randn(4, 5) * 400\ne = s.exp()\nprint(e / e.sum(1, keepdim=True))\n",
        "in logarithms",
    ),
    "a recursion that grows": (
        "h = torch.ones(3)\nfor _ in range(99):\n    h = h + h * 3.0\nprint(h.sum())\n",
        "learning rate",
    ),
    "an exponent of small numbers": (
        "w = torch.full((3, 3), 99.0)\nx = torch.ones(2, 3)\nprint(torch.exp(x @ w))\n",
        "scale x",
    ),
    "a row that a mask left empty": (
        "K = torch.exp(-torch.rand(3, 3) * 300)\nm = torch.tensor([1.0, 1.0, 0.0])\n"
        "print((K.sum(1) * m).log())\n",
        "made 0 of",
    ),
    "weights of masked scores": (
        "s = torch.zeros(2, 3)\ns[1] = -1e9\nprint(1 / torch.exp(s).sum(1))\n",
        "made 0 of",
    ),
    "a sine of roundings": (
        "c = torch.tensor([1.0000001, 0.5])\nprint(torch.sqrt(1 - c ** 2))\n",
        "roundings",
    ),
    "a small number among large ones": (
        "x = torch.tensor([0.99, 1e6])\ny = x - 1\nprint(torch.log(y))\n",
        "roundings",
    ),
    "a variance that is chosen among larger ones": (
        "P = torch.diag(torch.tensor([1e6, -0.5]))\nH = torch.tensor([[0.0, 1.0]])\n"
        "S = H @ P @ H.T\nprint(torch.log(S * 2))\n",
        "roundings",
    ),
    "a count of a mask": (
        "m = torch.zeros(3)\nx = torch.randn(3)\nprint((x * m).sum() / m.sum())\n",
        "count less one",
    ),
    "a difference that is no count": (
        "x = torch.tensor([1.0, 2.5])\nprint(torch.ones(2) / (x - 1))\n",
        "count less one",
    ),
    "an exposure in fractions": (
        "n = torch.tensor([30.5, 0.0, 12.0])\nprint((n.log() + 1).sum())\n",
        "drop the rows",
    ),
    "a power that has a derivative at 0": (
        "x = torch.tensor([0.0, 2.0], requires_grad=True)\nr = x * 3\n"
        "y = torch.where(r > 0, r.log(), r) + r ** 2\ny.sum().backward()\n",
        "away from 0 where it is made",
    ),
    "a zero among fractions": (
        "x = torch.tensor([0.0, 0.25, 3.5])\nprint(torch.log(x))\n",
        "counts",
    ),
}


def fixes_of(run_here: RunHere, text: str) -> list[str]:
    """The lines of the first finding that say what to do."""
    status, _, err = run_here(HEAD + text)
    assert status == 3, err
    lines = err.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("  fix: ")), None)
    assert first is not None, err
    return [lines[first], *(x for x in lines[first + 1 : first + 3] if x.startswith("  or: "))]


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    """With the program's own names, as far as its line has them."""
    text, fix = FIRST[name]
    assert fix in fixes_of(run_here, text)[0]


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_told_something_else(run_here: RunHere, name: str) -> None:
    """The rule asks for the operation, its numbers, and what is around it."""
    text, fix = TWINS[name]
    assert not any(fix in line for line in fixes_of(run_here, text))


@pytest.mark.parametrize(
    "text",
    [
        "y = torch.where(seen, y, 0.0)\nerr = (net(x)[:, 0] - y) ** 2\n",
        "err = ((net(x)[:, 0])[seen] - y[seen]) ** 2\n",
        "err = torch.where(seen, y, 0.0) - net(x)[:, 0] * seen\n",
    ],
)
def test_what_is_hidden_before_the_arithmetic_is_healthy(run_here: RunHere, text: str) -> None:
    """As it is advised."""
    data = "net = torch.nn.Linear(3, 1)\nx, y = torch.randn(6, 3), torch.randn(6)\n"
    data += "y[4] = math.nan\nseen = ~y.isnan()\n"
    status, _, err = run_here(f"{HEAD}{data}{text}err.mean().backward()\n")
    assert status == 0, err


def test_a_weight_that_a_script_makes_is_no_data(run_here: RunHere) -> None:
    """It is multiplied with data from the right, and grew."""
    text = (
        "x, y = torch.randn(8, 3), torch.randn(8)\n"
        "p = {'w': torch.rand(3, 3), 'v': torch.rand(3)}\n"
        "f = lambda p: ((torch.relu(x @ p['w']) @ p['v'] - y) ** 2).mean()\n"
        "for _ in range(60):\n    g = torch.func.grad(f)(p)\n"
        "    p = {k: p[k] - 9.0 * g[k] for k in p}\nprint(p['v'].sum().item())\n"
    )
    err = run_here(HEAD + text).err
    assert "made inf" in err.partition("\n")[0]
    assert "scale x" not in err


def test_what_exp_made_0_of_fits_float64(run_here: RunHere) -> None:
    """That is said if it does."""
    fixes = fixes_of(run_here, VANISHED["a Gibbs kernel"][0])
    assert (
        "compute in float64 from exp (script.py:6) on: it holds exp down to exp(-744)" in fixes[1]
    )
    assert len(fixes_of(run_here, VANISHED["a mixture by hand"][0])) == 1


def test_a_last_difference_may_be_bounded(run_here: RunHere) -> None:
    """At the size of its roundings, by its name."""
    fixes = fixes_of(run_here, CANCELLED["a posterior variance"][0])
    assert "bound it at the size of its roundings, var.clamp(min=5e-05)" in fixes[1]


def test_a_divergence_may_be_left_to_torch(run_here: RunHere) -> None:
    """With both of its operands, in their order."""
    fixes = fixes_of(run_here, WEIGHED["a divergence from a target made beside a model"][0])
    assert 'F.kl_div(logq, target, reduction="none")' in fixes[1]


AGAIN = {
    "a line further": (
        "x = torch.tensor([1.0, 0.5])\n"
        "z = torch.log(x) - torch.log1p(-x)\n"
        "ldj = (-torch.log(x) - torch.log1p(-x)).sum()\n"
        "print(z.sum() + ldj)\n",
        "log1p((-x).clamp(min=-1 + 5e-07)), and likewise at script.py:6 (advice)",
    ),
    "a function": (
        "def terms(p):\n    a = p.acosh()\n    if len(p) > 1:\n        a = a + p.acosh() ** 2\n"
        "    return a\n"
        "p = torch.tensor([1.0, 2.0], requires_grad=True)\nterms(p).sum().backward()\n",
        ", and likewise at script.py:7 (advice)",
    ),
    "another number": (
        "x = torch.tensor([1.0, 0.5])\n"
        "z = torch.log1p(-x)\n"
        "x = x / 2\n"
        "print(z.sum() + torch.log1p(-x).sum())\n",
        "log1p((-x).clamp(min=-1 + 5e-07)) (advice)",
    ),
    "once": (
        "x = torch.tensor([1.0, 0.5])\nprint(torch.log1p(-x).sum())\n",
        "log1p((-x).clamp(min=-1 + 5e-07)) (advice)",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_bound_is_told_for_all_lines_that_need_it(run_here: RunHere, name: str) -> None:
    """That apply the operation to the same expression, with the same value."""
    text, fix = AGAIN[name]
    err = run_here(HEAD + text).err
    assert fix in err.split("fix:")[1].splitlines()[0], err


LOST_SPREADS = {
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


@pytest.mark.parametrize("name", LOST_SPREADS)
def test_a_spread_of_what_is_constant_or_far_from_0(run_here: RunHere, name: str) -> None:
    """Whose roundings are negative, or which is 0."""
    text, fix = LOST_SPREADS[name]
    err = run_here(HEAD + text).err
    first = err.partition("fix: ")[2].partition("\n")[0]
    assert first.startswith(fix), err
    others = {each for _, each in LOST_SPREADS.values() if each and each != fix}
    assert not any(each in err for each in others), err


SAMPLER = (
    "def energy(q):\n    return (q.exp() - 0.5 * q.exp() - 1).square().sum()\n"
    "q, step, rate = torch.ones(2), 200.0, 0.0\n"
    "for turn in range(6):\n"
    "    x = q.clone().requires_grad_()\n"
    "    u = energy(x)\n    u.backward()\n"
    "    new = q + step * x.grad + torch.randn(2)\n"
    "{accept}"
    "    q = new if {accepts} else q\n"
    "    step = step * (1 + 0.1 * (rate - 0.8))\n"
    "print(step)\n"
)
SAMPLERS = {
    "a probability": (
        "    rate = torch.exp(u.detach() - energy(new)).clamp(max=1)\n",
        "torch.rand(()) < rate",
    ),
    "its logarithm": (
        "    rate = u.detach() - energy(new)\n",
        "torch.rand(()).log() < rate",
    ),
    "a number of Python": (
        "    rate = torch.exp(u.detach() - energy(new)).clamp(max=1).item()\n",
        "torch.rand(1).item() < rate",
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_proposal_that_diverges_is_to_be_rejected(run_here: RunHere, name: str) -> None:
    accept, accepts = SAMPLERS[name]
    err = run_here(HEAD + SAMPLER.format(accept=accept, accepts=accepts)).err
    assert "overflow" in err, err
    first = err.partition("fix: ")[2].partition("\n")[0]
    assert first.startswith("reject a proposal that diverges: take 0 for `rate` (script.py:12)"), (
        err
    )


def test_a_random_choice_is_no_proposal(run_here: RunHere) -> None:
    """As that of noise, whose probability is no ratio."""
    accept, accepts = "    rate = 0.9 + 0 * energy(new)\n", "torch.rand(()) < rate"
    err = run_here(HEAD + SAMPLER.format(accept=accept, accepts=accepts)).err
    assert "overflow" in err, err
    assert "reject" not in err


SMOOTHED = {
    "smoothed": ("F.cross_entropy(x, y, label_smoothing=0.1)", "smooth over the classes that"),
    "not smoothed": (
        "F.cross_entropy(x, y, label_smoothing=0.0)",
        "leave out targets that the mask",
    ),
    "nothing said": ("F.cross_entropy(x, y)", "leave out targets that the mask"),
}


@pytest.mark.parametrize("name", SMOOTHED)
def test_a_loss_of_masked_classes(run_here: RunHere, name: str) -> None:
    """Which smooths its targets over all classes, or has a target that is masked."""
    call, fix = SMOOTHED[name]
    target = "[1, 2]" if "label_smoothing=0.1" in call else "[0, 2]"
    err = run_here(
        HEAD + "net = torch.nn.Linear(4, 3)\n"
        "x = net(torch.randn(2, 4)).masked_fill(torch.tensor([True, False, False]), -math.inf)\n"
        f"y = torch.tensor({target})\nloss = {call}\nloss.backward()\n"
    ).err
    assert f"fix: {fix}" in err, err


FORWARDS = {
    "normalised at each turn": (
        "    c[t] = a.sum()\n    alpha[t] = a / c[t]\n    a = alpha[t]\n",
        "work with logarithms, logsumexp in place of the sum",
    ),
    "never normalised": ("", "normalise `a` at every turn"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_product_of_densities(run_here: RunHere, name: str) -> None:
    """Where one observation has a density of 0 in all states, or all of them are small."""
    turn, fix = FORWARDS[name]
    x = "[0.1, 0.2, 0.1, 0.3, 40.0]" if turn else "[9.0] * 12"
    err = run_here(
        HEAD + f"xs, alpha, c = torch.tensor({x}), torch.zeros(12, 2), torch.zeros(12)\n"
        "A, mu = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0.0, 1.0])\n"
        "a = torch.tensor([0.5, 0.5])\n"
        "for t, x in enumerate(xs):\n"
        "    b = torch.exp(-0.5 * (x - mu) ** 2)\n"
        "    a = (a @ A) * b\n"
        f"{turn}"
        "print((alpha.sum() if alpha.any() else 0) + a.sum().log())\n"
    ).err
    assert fix in err, err


def test_a_scale_that_is_not_enough_is_no_fix(run_here: RunHere) -> None:
    """The product of scaled operands overflows as well; where it does not, that comes first."""
    for size, is_enough in ((220.0, True), (400.0, False)):
        err = run_here(
            HEAD + "class Net(torch.nn.Module):\n"
            "    def forward(self, q, k):\n"
            "        return ((q @ k.transpose(-1, -2)) / 4).softmax(-1)\n"
            f"q = torch.full((2, 3, 4), {size}, dtype=torch.float16)\n"
            "print(Net()(q, q).sum())\n"
        ).err
        assert "overflow" in err, err
        assert ("scale an operand before the product" in err) is is_enough, err


OF_DATA = {
    "filled": "torch.log1p(torch.nan_to_num(x))",
    "as it is": "torch.log1p(x.float())",
    "of an array": "torch.log1p(torch.from_numpy(x.numpy()).float())",
    "computed": "torch.log1p(x * 2)",
}


@pytest.mark.parametrize("name", OF_DATA)
def test_a_logarithm_of_data_below_its_domain(run_here: RunHere, name: str) -> None:
    """Whether the data is right or not is for the user to say; what is computed is another case."""
    err = run_here(
        HEAD + "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        f"        return self.layer({OF_DATA[name]})\n"
        "data = torch.tensor([[1.0, -3.0, 2.0], [0.0, 5.0, 1.0]])\n"
        "Net()(data).sum().backward()\n"
    ).err
    assert "log1p made NaN" in err, err
    assert ("is -3 in the data: take sign(" in err) is (name != "computed"), err


ENDS = {
    "a logit of dequantized pixels": (
        "x = (torch.tensor([255.0, 3.0]) + 0.9999999) / 256\nz = torch.log(x) - torch.log1p(-x)\n",
        "keep x inside (0, 1) where it is made, in div (script.py:4), by clamp(5e-07, 1 - 5e-07)",
    ),
    "samples, and a logarithm of the rest": (
        "u = torch.tensor([0.2, 1e-20])\nv = 1 - u ** 2\nprint(torch.log(1 - v.pow(0.5)).sum())\n",
        "keep v below 1 where it is made, in sub (script.py:5), by clamp(max=1 - 5e-07)",
    ),
    "a correlation": (
        "r = torch.tensor([0.5, 3.0]) / torch.tensor([1.0, 3.0])\nz = torch.atanh(r)\n",
        "keep r inside (-1, 1) where it is made, in div (script.py:4), by "
        "clamp(-1 + 5e-07, 1 - 5e-07)",
    ),
    "a function's argument": (
        "def prior(v):\n    return torch.log1p(-v)\n"
        "w = torch.tensor([1.0, 1e-9]) * 0.5 + 0.5\nz = prior(w)\n",
        "keep v below 1 where it is made, in add (script.py:6), by clamp(max=1 - 5e-07)",
    ),
    "a bound that is 1 in float32": (
        "u = torch.tensor([0.5, 1.0]).clamp(1e-8, 1 - 1e-8)\n"
        "z = torch.log(u) - torch.log(1.0 - u)\n",
        "keep u inside (0, 1) where it is made, in clamp (script.py:4), by "
        "clamp(5e-07, 1 - 5e-07): 1 - 1e-08 is 1 in float32",
    ),
    "a divisor": (
        "r = torch.tensor([0.5, 1.2]).clamp(max=1.0)\nz = r / (1 - r**2)\n",
        "keep r below 1 where it is made, in clamp (script.py:4), by clamp(max=1 - 5e-07) (advice)",
    ),
    **{
        f"both bounds lost, {how} of {end}": (
            f"a = torch.tensor([0.5, {end}]).clamp(-1 + 1e-8, 1 - 1e-8)\nz = {text}\n",
            "keep a inside (-1, 1) where it is made, in clamp (script.py:4), by "
            "clamp(-1 + 5e-07, 1 - 5e-07): 1 - 1e-08 is 1 in float32",
        )
        for end in (1.0, -1.0)
        for how, text in (
            ("log1p", "0.5 * (torch.log1p(a) - torch.log1p(-a))"),
            ("logs", "torch.log(1 + a) - torch.log(1 - a)"),
            ("a ratio", "0.5 * torch.log((1 + a) / (1 - a))"),
        )
    },
    "both bounds lost, in a method": (
        "class Squash:\n    eps = 1e-9\n    def inverse(self, y):\n"
        "        y = torch.clamp(y, min=-1 + self.eps, max=1 - self.eps)\n"
        "        return 0.5 * (y.log1p() - (-y).log1p())\n"
        "print(Squash().inverse(torch.tensor([0.1, -1.0])))\n",
        "keep y inside (-1, 1) where it is made, in clamp (script.py:7), with a "
        "larger `self.eps`, such as 5e-07: 1 - 1e-09 is 1 in float32",
    ),
    "both bounds lost, in half precision": (
        "y = torch.tensor([0.1, 1.0]).half().clip(-1 + 1e-4, 1 - 1e-4)\n"
        "print(torch.log1p(y) - torch.log1p(-y))\n",
        "keep y inside (-1, 1) where it is made, in clip (script.py:4), by "
        "clamp(-1 + 4e-03, 1 - 4e-03): 1 - 1e-04 is 1 in float16",
    ),
    "one bound that matters": (
        "c = torch.tensor([0.3, 1.5]).clamp(-1 + 1e-8, 1 - 1e-8)\nz = torch.log1p(-c)\n",
        "keep c below 1 where it is made, in clamp (script.py:4), by clamp(max=1 - 5e-07): 1 - ",
    ),
    "a lower bound alone": (
        "c = torch.tensor([0.3, -1.5]).clamp(min=-1 + 1e-8)\nz = torch.log1p(c)\n",
        "keep c above -1 where it is made, in clamp (script.py:4), by clamp(min=-1 + 5e-07): -1 + ",
    ),
    "data at both ends": (
        "c = torch.tensor([0.3, -1.0])\nz = torch.log1p(c) - torch.log1p(-c)\n",
        "bound the argument",
    ),
    "1 added to data": (
        "c = torch.tensor([0.3, 1.0]) * -1.0\nz = torch.log(1 + c)\n",
        "bound the argument",
    ),
    "made on the line itself": (
        "u = torch.tensor([0.2, 1e-20])\nz = torch.log1p(-(1 - u))\n",
        "bound the argument",
    ),
    "data": ("v = torch.tensor([0.5, 1.0])\nz = torch.log1p(-v)\n", "bound the argument"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_rounds_to_1_is_bounded_where_it_is_made(run_here: RunHere, name: str) -> None:
    """All that read it need the bound; what nothing has made is bounded where it is read."""
    text, fix = ENDS[name]
    err = run_here(HEAD + text + ("" if "print" in text else "print(z.sum())\n")).err
    first = next(line for line in err.splitlines() if "fix: " in line)
    assert fix in first, err


OF_ROWS = (
    "subtract the maximum of each row that is normalised (script.py:{}), {}, and not one of all"
)
OF_GROUPS = (
    "subtract the maximum of each group that is normalised (script.py:{}), by scatter_reduce"
)
EDGES = "i = torch.tensor([0, 0, 1, 1, 2])\ns = torch.tensor([190.0, 189.0, 1.0, 2.0, 3.0])\n"

ONE_MAXIMUM = {
    "rows": (
        "logits = torch.randn(3, 4)\nlogits[1] = -300\nw = torch.exp(logits - logits.max())\n"
        "p = w / w.sum(1, keepdim=True)\nprint(p)\n",
        OF_ROWS.format(6, "logits.amax(dim, keepdim=True)"),
    ),
    "a maximum that has a name": (
        "z = torch.randn(3, 4) - 400 * torch.eye(3)[:, :1]\nmost = torch.amax(z).detach()\n"
        "e = (z - most).exp()\ntotal = e.sum(-1)\nprint(e / total[:, None])\n",
        OF_ROWS.format(6, "z.amax(dim, keepdim=True)"),
    ),
    "a maximum that is a number of Python": (
        "z = torch.randn(3, 4)\nz[2] -= 500\nbig = z.max().item()\n"
        "e = torch.exp((z - big) / 2)\nprint(e / e.sum(1, keepdim=True))\n",
        OF_ROWS.format(7, "z.amax(dim, keepdim=True)"),
    ),
    "edges of nodes": (
        EDGES + "w = torch.exp(s - torch.max(s))\nt = torch.zeros(3).index_add_(0, i, w)\n"
        "print(w / t[i])\n",
        OF_GROUPS.format(6),
    ),
    "groups in a model": (
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.score = torch.nn.Linear(1, 1)\n"
        "    def forward(self, x, i):\n"
        "        a = self.score(x).squeeze(1)\n"
        "        a = a - a.max()\n"
        "        e = a.exp()\n"
        "        return e / torch.zeros(3).scatter_add(0, i, e).gather(0, i)\n"
        "net = Net()\ntorch.nn.init.ones_(net.score.weight)\n"
        + EDGES
        + "net(s[:, None], i).sum().backward()\n",
        OF_GROUPS.format(10),
    ),
    "groups that are nearly 0": (
        "w = torch.ones(1, requires_grad=True)\n"
        + EDGES
        + "s = s * w * 0.535\ne = torch.exp(s - s.max())\n"
        "t = torch.zeros(3).index_add(0, i, e)\n(e / t[i]).square().sum().backward()\n",
        OF_GROUPS.format(8),
    ),
}

OTHER_MAXIMA = {
    "one of each row already": (
        "s = torch.randn(3, 4)\nkeep = torch.ones(3, 4)\nkeep[1] = 0\n"
        "w = torch.exp(s - s.amax(1, keepdim=True)) * keep\nprint(w / w.sum(1, keepdim=True))\n"
    ),
    "nothing left by a mask": (
        "s = torch.randn(3, 4)\nkeep = torch.ones(3, 4)\nkeep[1] = 0\n"
        "w = torch.exp(s - s.max()) * keep\nprint(w / w.sum(1, keepdim=True))\n"
    ),
    "rows of scores that a number masks": (
        "s = torch.randn(3, 4)\ns[1] = -1e9\nw = torch.exp(s - s.max())\n"
        "print(w / w.sum(1, keepdim=True))\n"
    ),
    "Sinkhorn": (
        "s = torch.randn(5, 4)\ns[1] -= 200\nq = torch.exp(s - s.max())\n"
        "for _ in range(3):\n    q = q / q.sum(1, keepdim=True)\n"
        "    q = q / q.sum(0, keepdim=True)\nprint(q)\n"
    ),
    "one sum of all": (
        "s = torch.tensor([0.0, -300.0])\nw = torch.exp(s - s.max())\np = w / w.sum()\n"
        "print(torch.log(p))\n"
    ),
}


@pytest.mark.parametrize("name", ONE_MAXIMUM)
def test_each_group_that_is_normalised_has_a_maximum(run_here: RunHere, name: str) -> None:
    """One maximum of everything leaves nothing of a row that is far below it."""
    text, fix = ONE_MAXIMUM[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


@pytest.mark.parametrize("name", OTHER_MAXIMA)
def test_other_zeros_beside_a_maximum(run_here: RunHere, name: str) -> None:
    """Which another maximum does not help."""
    err = run_here(HEAD + OTHER_MAXIMA[name]).err
    assert "fix: " in err
    assert "subtract the maximum of each" not in err, err


BOTH = "both sides are 0 where {} is {}: take the limit there, {}, by where({} == 0, {}, ... / "

LIMITS = {
    "sin(x) / x": (
        "x = torch.tensor([0.0, 1.0, -2.0])\nprint(torch.sin(x) / x)\n",
        BOTH.format("x", 0, 1, "x", 1) + "where(x == 0, 1, x)); torch.sinc(x / torch.pi) does so",
    ),
    "a rotation": (
        "v = torch.eye(2, 3)[:, 1:]\nangle = v.norm(dim=-1)\n"
        "b = (1 - torch.cos(angle)) / angle**2\nprint(b)\n",
        BOTH.format("angle", 0, 0.5, "d", 0.5) + "where(d == 0, 1, d)), with d = angle ** 2;",
    ),
    "a rotation's third term": (
        "v = torch.eye(2, 3)[:, 1:]\nangle = v.norm(dim=-1)\n"
        "print((angle - torch.sin(angle)) / angle.pow(3))\n",
        BOTH.format("angle", 0, "1 / 6", "d", "1 / 6"),
    ),
    "a slerp": (
        "a, t = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 0.7])\n"
        "omega = torch.acos(a)\ns = torch.sin((1 - t) * omega) / torch.sin(omega)\nprint(s)\n",
        BOTH.format("omega", 0, "1 - t", "d", "1 - t"),
    ),
    "a decay": (
        "k = torch.tensor([0.0, 0.5])\nprint((1 - torch.exp(-k)) / k)\n",
        BOTH.format("k", 0, 1, "k", 1),
    ),
    "an integrator": (
        "h, rate = torch.tensor([0.0, 0.5]), torch.tensor([0.7, 0.2])\n"
        "phi = torch.expm1(-rate * h) / (-rate * h)\nprint(phi)\n",
        BOTH.format("-rate * h", 0, 1, "d", 1),
    ),
    "a Bernoulli function": (
        "E = torch.tensor([0.0, 0.5])\nprint(E / (torch.exp(E) - 1))\n",
        BOTH.format("E", 0, 1, "d", 1),
    ),
    "a logarithmic mean": (
        "r = torch.tensor([1.0, 0.5])\nprint(torch.log(r) / (r - 1))\n",
        BOTH.format("r", 1, 1, "d", 1),
    ),
    "a map to a ball, in a model": (
        "class Ball(torch.nn.Module):\n"
        "    def forward(self, w):\n"
        "        size = w.norm(dim=-1, keepdim=True)\n"
        "        return torch.tanh(size) / size * w\n"
        "w = torch.eye(2, 3)[:, 1:].requires_grad_()\nBall()(w).sum().backward()\n",
        BOTH.format("size", 0, 1, "size", 1),
    ),
    "a logarithm, in a model": (
        "class Gain(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.log1p(2 * x) / x\n"
        "print(Gain()(torch.tensor([[0.0, 3.0]])))\n",
        BOTH.format("x", 0, 2, "x", 2),
    ),
}

NO_LIMITS = {
    "counts": (
        "m = torch.zeros(3)\nx = torch.randn(3)\nprint((torch.sin(x) * m).sum() / m.sum())\n",
        "take m.sum().clamp(min=1)",
    ),
    "a sign": (
        "x = torch.tensor([0.0, 1.0, -2.0])\nprint(torch.tanh(x) / x.abs())\n",
        "choose the divisor d = x.abs() by where",
    ),
    "a limit of 0": (
        "x = torch.tensor([0.0, 0.5])\nprint((1 - x.cos()) / x)\n",
        "choose the divisor by where(x == 0, 1, x)",
    ),
    "two that are 0 for reasons of their own": (
        "x, y = torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.3])\nprint(torch.sin(x) / y)\n",
        "choose the divisor by where(y == 0, 1, y)",
    ),
    "a vector by its norm": (
        "v = torch.eye(2, 3)[:, 1:]\nprint(v / v.norm(dim=1, keepdim=True))\n",
        "take F.normalize(v, dim=dim)",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_quotient_of_zeros_has_a_limit(run_here: RunHere, name: str) -> None:
    """And 0 is not it."""
    text, fix = LIMITS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err
    assert "  or: " not in err


@pytest.mark.parametrize("name", NO_LIMITS)
def test_other_quotients_of_zeros_have_none(run_here: RunHere, name: str) -> None:
    text, fix = NO_LIMITS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


EVENTS = "d, n = torch.tensor([1.0, 2, 0, 3, 2]), torch.tensor([9.0, 8, 6, 6, 2])\n"
ZERO = "{} is 0 (script.py:{}), and so is `{}` from there on: stop before that, or leave out where"

ZERO_FACTORS = {
    "a survival curve": (
        EVENTS + "s, out = torch.ones(()), torch.ones(5)\nfor t in range(5):\n"
        "    s = s * (1 - d[t] / n[t])\n    out[t] = s\nprint(torch.zeros(5) / out[4])\n",
        ZERO.format("1 - d[t] / n[t]", 7, "s"),
    ),
    "a survival curve that began with a number": (
        EVENTS + "alive = 1.0\nfor each, left in zip(d, n):\n"
        "    stay = 1 - each / left\n    alive = alive * stay\nprint(1 / alive)\n",
        ZERO.format("stay", 7, "alive"),
    ),
    "a cumulative product": (
        EVENTS + "G = torch.cumprod(1 - d / n, 0)\nprint(torch.zeros(5) / G)\n",
        ZERO.format("1 - d / n", 5, "G"),
    ),
    "hazards in a model": (
        "class Survival(torch.nn.Module):\n"
        "    def forward(self, h):\n"
        "        s = torch.ones(h.shape[0])\n"
        "        for k in range(h.shape[1]):\n            s = s * (1 - h[:, k])\n"
        "        return s.log()\n"
        "h = torch.rand(3, 6)\nh[1, 4] = 1.0\nprint(Survival()(h))\n",
        ZERO.format("1 - h[:, k]", 8, "s"),
    ),
    "a product in place": (
        "p, keep = torch.ones(3), torch.tensor([0.9, 0.5, 0.0])\n"
        "for _ in range(6):\n    p *= keep\nprint((p * 0) / p)\n",
        ZERO.format("keep", 4, "p"),
    ),
    "so many factors": (
        "p, keep = torch.ones(3), torch.tensor([0.9, 0.5, 1e-3])\n"
        "for _ in range(30):\n    p = p * keep\nprint((p * 0) / p)\n",
        "normalise `p` at every turn (script.py:6)",
    ),
    "so many factors, from a start with a 0": (
        "a, A = torch.tensor([1.0, 0.0]), torch.full((2, 2), 0.5)\nA[0, 0] = 0\n"
        "for _ in range(90):\n    a = (a @ A) * 0.1\nprint(torch.log(a.sum()))\n",
        "normalise `a` at every turn (script.py:7)",
    ),
    "an exponential that made 0": (
        "a, A = torch.ones(2) / 2, torch.full((2, 2), 0.5)\n"
        "for k in range(6):\n    a = (a @ A) * torch.exp(-torch.tensor([900.0, 800]) * (k == 5))\n"
        "print(torch.log(a.sum()))\n",
        "exp (script.py:6) made 0 of -900: work in logs there (logsumexp)",
    ),
}


@pytest.mark.parametrize("name", ZERO_FACTORS)
def test_a_product_is_0_because_of_one_factor(run_here: RunHere, name: str) -> None:
    """Or of many that are small, or of an exponential."""
    text, fix = ZERO_FACTORS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


ADDS = (
    "class Net(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n"
    "        self.delta = torch.nn.Parameter(torch.tensor([0.5, -0.4]))\n"
    "        self.lin = torch.nn.Linear(2, 2)\n"
    "    def forward(self, x):\n"
    "        {}\n"
    "net = Net()\nnet(torch.tensor([[0.1, 0.2], [0.3, 0.1]])).sum().backward()\n"
)

ADDED = {
    "a power of energies": (
        ADDS.format("e = x.square() * (1e-3 + x) ** -0.5; return (e + self.delta) ** 0.9"),
        "keep delta positive, by softplus or exp of a free parameter",
    ),
    "a logarithm of magnitudes": (
        ADDS.format("s = x.abs() + self.delta; return torch.log(s) - self.delta"),
        "keep delta positive, by softplus or exp of a free parameter",
    ),
    "the inverse root of a variance": (
        ADDS.format("v = x.var(0); return x * torch.rsqrt(1e-8 + v + self.delta)"),
        "keep delta positive, by softplus or exp of a free parameter",
    ),
    "a root of an activation": (
        ADDS.format("return torch.sqrt(F.relu(self.lin(x)) * 0.1 + self.delta)"),
        "keep delta positive, by softplus or exp of a free parameter",
    ),
    "data": (
        ADDS.format("return torch.log(x + self.delta)"),
        "keep delta positive, by softplus or exp of a free parameter",
    ),
    "a script": (
        "b = torch.tensor([-0.5], requires_grad=True)\nx = torch.randn(5)\n"
        "torch.log(x.square() + b).sum().backward()\n",
        "keep b positive, by softplus or exp of a free parameter",
    ),
    "a layer": (
        ADDS.format("return torch.sqrt(self.lin(x) - 3 + self.delta)").replace(" - 3", ""),
        "make positive what linear (script.py:10) makes",
    ),
    "data that is more negative": (
        ADDS.format("return torch.log(x - 9 + self.delta)"),
        "see why (x - 9 + self.delta) is negative",
    ),
    "a difference": (
        ADDS.format("return torch.log(x.abs() - self.delta)"),
        "see why (x.abs() - self.delta) is negative",
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_parameter_that_is_added_stays_positive(run_here: RunHere, name: str) -> None:
    """Where what it is added to is positive, or data."""
    text, fix = ADDED[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


MADE = "pow (script.py:{}) made 0 of {}: work in logs there, the exponent times log of the base"
LOOK = "look at the numbers that pow (script.py:{}) reads, up to {}: of all of them it makes 0"

POWERS = {
    "weights by age": (
        "age = torch.tensor([[1.0, 2.0], [5000.0, 7000.0]])\nw = 0.5 ** (age / 30)\n"
        "print(w / w.sum(1, keepdim=True))\n",
        MADE.format(5, "0.5 ** 233.3"),
    ),
    "a decay that is learned": (
        "class Pool(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.decay = torch.nn.Parameter(torch.tensor(0.9))\n"
        "    def forward(self, t):\n        w = self.decay ** t\n"
        "        return (w * t).sum(1) / w.sum(1)\n"
        "print(Pool()(torch.tensor([[1.0, 2.0], [5000.0, 7000.0]])).sum())\n",
        MADE.format(9, "decay ** 7000"),
    ),
    "a power law": (
        "age = torch.tensor([[1.0, 2.0], [5e8, 7e9]])\nw = (1 + age) ** -6\n"
        "print(w / w.mean(1, keepdim=True))\n",
        MADE.format(5, "7e+09 ** -6"),
    ),
    "times of another unit": (
        "ms = (torch.rand(40) + 1) * 1e9\nw = torch.pow(0.5, ms / 300)\n"
        "print(torch.log(w.mean()))\n",
        LOOK.format(5, "6.51e+06, made of numbers up to 1.95e+09 in mul (script.py:4)"),
    ),
    "an outlier": (
        "ts = torch.where(torch.arange(9) == 4, 1.7e12, torch.linspace(1.7e9, 1.71e9, 9))\n"
        "age = (ts.max() - ts) / 86400\nw = 0.5 ** (age / 30)\nw = w[:4]\n"
        "print(w / w.mean())\n",
        LOOK.format(6, "6.55e+05, made of numbers up to 1.7e+12 in where (script.py:4)"),
    ),
    "ages in a model": (
        "class Recent(torch.nn.Module):\n"
        "    def forward(self, x, age):\n        w = 0.9 ** age\n"
        "        return (w * x).sum() / w.sum()\n"
        "print(Recent()(torch.randn(4), torch.full((4,), 1e6)))\n",
        LOOK.format(6, "1e+06"),
    ),
    "energies": (
        "e = torch.rand(40) * 1e5 + 1e4\nw = torch.exp(-e)\nprint(w / w.sum())\n",
        "take softmax(-e, dim) in place of exp(-e)",
    ),
    "weights under a mask": (
        "keep = torch.tensor([[1.0, 1.0], [0.0, 0.0]])\nw = 0.5 ** torch.rand(2, 2) * keep\n"
        "print(w / w.sum(1, keepdim=True))\n",
        "choose the divisor d = w.sum(1, keepdim=True) by where",
    ),
}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_has_made_0(run_here: RunHere, name: str) -> None:
    """Of ordinary numbers, or of such as no guard of the divisor helps."""
    text, fix = POWERS[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


RATES = {
    "a table that is a tensor": (
        "table = (1.0 - torch.arange(9) / 4) ** 0.9\nrate = lambda it: table[it].item()\n",
        ": table[5] (script.py:5), which is nan: `table` comes from script.py:4: table = (1.0 -",
    ),
    "a table that is a list": (
        "rates = [1.0, 0.5, 0.2, math.nan, 0.1]\nrate = lambda n: 0.5 * rates[n]\n",
        ": rates[3] (script.py:5), which is nan: `rates` comes from script.py:4: rates = [1.0",
    ),
    "a power": (
        "import numpy\none, last = numpy.float64(1.0), 3\n"
        "rate = lambda it: float((one - it / last) ** 0.9)\n",
        ": (1.0 - 4 / 3) ** 0.9 (script.py:6), a fractional power of a negative number",
    ),
    "a function that calls another one": (
        "def part(x, total):\n    return 1 - x / total\n"
        "def rate(step):\n    if step < 2:\n        return 1.0\n"
        "    left = part(step, 4)\n    return left * 1e308 * 100\n",
        ": 0.5 * 1e+308 * 100 (script.py:10), which is inf",
    ),
    "a function with effects": (
        "calls = []\ndef rate(step):\n    calls.append(step)\n    assert calls.count(step) < 2\n"
        "    return 1.0 if step < 2 else math.inf\n",
        " (advice)",
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_part_of_a_schedule_that_is_bad(run_here: RunHere, name: str) -> None:
    """With its numbers; what is more than arithmetic is not done again."""
    text, fix = RATES[name]
    err = run_here(
        HEAD + text + "net = torch.nn.Linear(2, 1)\no = torch.optim.SGD(net.parameters(), 0.1)\n"
        "s = torch.optim.lr_scheduler.LambdaLR(o, rate)\n"
        "for _ in range(8):\n    o.zero_grad()\n    net(torch.ones(3, 2)).sum().backward()\n"
        "    o.step()\n    s.step()\n"
    ).err
    assert f"fix: look at how the learning rate is computed{fix}" in err, err


def test_a_part_that_is_complex(here: Any) -> None:
    """A power of Python's own numbers; a function that is not bad has no such part."""
    total = 90
    found = bad_part(lambda it: (1 - it / total) ** 0.9, 91)
    assert found is not None
    assert (found.text, found.is_power) == ("(1 - 91 / 90) ** 0.9", True)
    assert bad_part(lambda it: (1 - it / total) ** 0.9, 89) is None
    assert bad_part(print, 1) is None


COARSE = {
    "times since 1970": ("1.7e9 + 30 * torch.arange(4.0, dtype=torch.float64)", True),
    "times since 1970, in hours from the start": (
        "((1.7e9 + 30 * torch.arange(4.0, dtype=torch.float64)).float() - 1.7e9) / 3600",
        True,
    ),
    "times since the start": ("torch.tensor([0.0, 30.0, 30.0, 60.0])", False),
}


@pytest.mark.parametrize("name", COARSE)
def test_a_difference_of_numbers_in_coarse_steps(run_here: RunHere, name: str) -> None:
    """Two of them are equal by rounding, or as they are."""
    times, is_rounded = COARSE[name]
    err = run_here(
        HEAD + f"t = ({times}).float()\n"
        "x = torch.randn(4)\n"
        "slope = (x[1:] - x[:-1]) / (t[1:] - t[:-1])\nprint(slope.sum())\n"
    ).err
    told = "or subtract a first value there, before it is float32: that holds numbers of 1.7e+09"
    assert (f"{told} in steps of 128" in err) is is_rounded, err
