"""What ``fxguard run`` proposes of numbers that left where something has a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS
from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

# A search that adds to a spread a share of it, and takes its root in the next turn.
SEARCH = (
    "var = torch.full((6,), 0.25)\nfor turn in range(4):\n"
    "    z = torch.randn(8, 6) * 3\n    x = var.{}() * z\n"
    "    g = (z ** 2 - 1).mean(0) * torch.tensor([1.0, -1, 1, -1, 1, -1])\n    {}\n"
    "assert x.isfinite().all()\n"
)
DOMAIN = "matrices with a determinant above 0"
MAGNITUDE = "takes its magnitude"
DEFINITE = "positive definite, as L @ L.mT"
SHARE = "by a factor that stays positive"
OPTION = "which is 0 (script.py:8), a number above 0"

# The distances of a renderer between two planes.
PLANES = (
    "class Options:\n    near, far, inverse = 0.0, 1.0, True\noptions = Options()\n"
    "near = {}\nfar = options.far * torch.ones(4, 1)\ns = torch.linspace(0, 1, 5).expand(4, 5)\n"
    "{}"
    "w = torch.ones(5, requires_grad=True)\n(z * w).sum().backward()\n"
)
BRANCHES = (
    "if options.inverse:\n    z = 1.0 / (1.0 / near * (1.0 - s) + 1.0 / far * s)\n"
    "else:\n    z = near * (1.0 - s) + far * s\n"
)
ALONE = "z = (1.0 - s) / near + s / far\n"
NEAR = "options.near * torch.ones(4, 1)"

# Time differences below and above 0, of which one half counts.
LAGS = (
    "t = torch.linspace(0, 200, 40)\nb = torch.tensor(1.0, requires_grad=True)\n"
    "lag = t[:, None] - t[None]\nk = {}\nk.sum().backward()\n"
)

SINKHORN = (
    "d = torch.rand(1, 6, 6, requires_grad=True)\nk = torch.exp(-d * torch.where("
    "torch.arange(6) == 2, 9e4, 1.0) / 0.01)\nfor turn in range(5):\n{}"
    "k.square().sum().backward()\n"
)

CONTRAST = (
    "x = torch.randn(6, 4, requires_grad=True)\n"
    "pos = torch.exp(x[:, 0])\nneg = torch.exp(x).sum(1)\n"
    "ng = {}\nloss = -torch.log({}).mean()\nloss.backward()\n"
)

COUNTS = (
    "y = torch.tensor([3.0, -1.0, 2.0])\nr = torch.full((3,), 2.5, requires_grad=True)\n"
    "seen = (y >= 0).float()\nll = {}\n(ll * seen).sum().backward()\n"
)

# An optimizer of one's own that keeps squares in half precision, row by row.
ROWS = (
    "acc = torch.zeros(5, dtype=torch.float16)\nw = torch.ones(5, 3, dtype=torch.float16)\n"
    "rows = torch.tensor([1, 3])\ng = torch.full((2, 3), 1e-5, dtype=torch.float16)\n"
    "acc[rows] += g.square().mean(1)\ndenom = acc[rows].sqrt() + 1e-8\n"
    "w[rows] -= 0.1 * g / {}\nassert w.isfinite().all()\n"
)

# Actions that a rollout stores after tanh has squashed them.
ACTIONS = (
    "u = torch.randn(6, 2) * {}\nstore = torch.zeros(6, 2)\nstore[:] = {}\n"
    "w = torch.ones(2, requires_grad=True)\n(torch.atanh(store) * w).sum().backward()\n"
)
FRAMES = (
    "n, hop = 16, 4\nwin = torch.hann_window(n)\nx = torch.randn(64, requires_grad=True)\n"
    "frames = x.unfold(0, n, hop) * win\nT = frames.shape[0]\n"
    "def add(f):\n"
    "    return F.fold(f.T[None].contiguous(), (1, 64), (1, n), stride=(1, hop)).view(64)\n"
    "env = {}\n(add(frames * win) / env).square().mean().backward()\n"
)
GRAPH = (
    "a = (torch.rand(9, 9) < 0.3).float()\na[0] = 0\na[1] = 0\na[1, 0] = 1\n"
    "w = torch.ones(9, requires_grad=True)\ndeg = a.sum(1)\n{}\n((a * s) @ w).sum().backward()\n"
)
ORBIT = (
    "p = {{'ecc': torch.tensor([0.3, 0.9])}}\n"
    "p = {{k: v.clone().requires_grad_() for k, v in p.items()}}\n"
    "o, e = torch.optim.SGD(p.values(), lr=0.2), torch.ones(2)\nfor turn in range(2):\n"
    "    nu = torch.atan2(torch.sqrt(1 + p['ecc']) * e,\n"
    "                     torch.sqrt({}) * e)\n"
    "    o.zero_grad()\n    (nu * 0 - p['ecc']).sum().backward()\n    o.step()\n"
)

# A hidden Markov model whose probabilities are scaled in each of its turns.
MARKOV = (
    "mu = torch.tensor([0.0, 1.0], requires_grad=True)\nx = torch.randn(3, {})\nx[1, -1] = 60.0\n"
    "b = torch.exp(-0.5 * (x[..., None] - mu) ** 2){}\na = torch.full((2, 2), 0.5)\n"
    "alpha, ll = 0.5 * b[:, 0], torch.zeros(3)\nfor t in range(x.shape[1]):\n"
    "    if t:\n        alpha = (alpha @ a) * b[:, t]\n    c = alpha.sum(-1, keepdim=True)\n"
    "    ll = ll + torch.log(c.squeeze(-1))\n    alpha = alpha / c\nll.mean().backward()\n"
)
STORE = (
    "store = torch.zeros(4, 3, dtype=torch.{})\nx = torch.full((4, 3), {})\n{}\n"
    "w = torch.ones(3, requires_grad=True)\n(store.float() * w).sum().backward()\n"
)

EPIDEMIC = (
    "a = torch.tensor({}, requires_grad=True)\ns, i = torch.tensor(0.9), torch.tensor(0.1)\n"
    "for t in range(12):\n    new = 2.5 * s ** a * i\n    s = s - new\n    i = i + new - 0.2 * i\n"
    "(s + i).backward()\n"
)
BALL = (
    "EPS = 1e-8\ndef project(x):\n    n = x.norm(dim=-1, keepdim=True)\n"
    "    return torch.where(n > 1 - EPS, x / n * (1 - EPS), x)\n"
    "w = torch.randn(5, 3, requires_grad=True)\nn = project(w * 9).norm(dim=-1)\n"
    "torch.atanh(n.clamp(max=1 - EPS)).sum().backward()\n"
)

CAUSAL = (
    "q = torch.randn(2, 5, 4, requires_grad=True)\nm = {}\n"
    "s = (q @ q.mT).masked_fill({}, -torch.inf)\n(s.softmax(-1) @ q).sum().backward()\n"
)

# The variances of a GARCH model, of parameters without a bound that a step has moved.
VARIANCES = (
    "e = torch.randn(6) * 0.01\nparams = torch.tensor({}, requires_grad=True)\n"
    "drift = torch.full((6,), -0.5)\n"
    "def path():\n    omega, alpha, beta = params\n    h = [e.var()]\n"
    "    for t in range(1, 6):\n        {}\n    return torch.stack(h)\n"
    "({}).sum().backward()\n"
)
GARCH = "h.append(omega + alpha * e[t - 1] ** 2 + beta * h[-1])"
WRITTEN_OUT = "v = omega + alpha * e[t - 1] ** 2 + beta * h[-1]\n        h.append(v)"
KEPT = "keep {} positive, by softplus or exp of a free parameter"

FIRST = {
    "a variance below 0": (
        VARIANCES.format("[-1e-3, 0.1, 0.6]", GARCH, "path().log()"),
        KEPT.format("omega"),
    ),
    "a variance that is written out": (
        VARIANCES.format("[-1e-3, 0.1, 0.6]", WRITTEN_OUT, "path().sqrt()"),
        KEPT.format("omega"),
    ),
    "a weight of squares below 0": (
        VARIANCES.format("[1e-7, -90.0, 0.1]", GARCH, "path().log()"),
        KEPT.format("alpha"),
    ),
    "a triangle without its diagonal": (
        CAUSAL.format("torch.tril(torch.ones(5, 5), diagonal=-1)", "m == 0"),
        "leave each row its own entry, diagonal=0 in tril (script.py:6)",
    ),
    "one that hides the diagonal": (
        CAUSAL.format("torch.ones(5, 5).triu().bool()", "m"),
        "leave each row its own entry, diagonal=1 in triu (script.py:6)",
    ),
    "a stock that is a base": (EPIDEMIC.format(0.96), "keep s above 0 where it is lowered"),
    "a bound at two lines": (BALL, "for `1 - EPS` (script.py:8 and script.py:11)"),
    "densities that vanished long ago": (
        MARKOV.format(40, " / 2.5"),
        "work in logs from exp (script.py:8) on",
    ),
    "a table that is written": (
        STORE.format("float16", 7e4, "store[1:] = x[1:]"),
        "keep store in float32 or bfloat16, or scale what is written",
    ),
    "a copy": (STORE.format("float16", 7e4, "store.copy_(x)"), "keep store in float32 or bfloat16"),
    "actions after tanh": (ACTIONS.format(9, "torch.tanh(u)"), "keep u, of which store is tanh(u)"),
    "one line of a statement": (
        ORBIT.format("1 - p['ecc']"),
        "keep the learned `p['ecc']` below 1",
    ),
    "windows that add up to 0": (
        FRAMES.format("add((win ** 2).expand(T, n))"),
        "pad by half a window at both ends",
    ),
    "a logarithm that divides": (GRAPH.format("s = 1 / deg.log()"), "take deg.clamp(min=2)"),
    "the same by columns": (GRAPH.format("s = (a / torch.log(deg))[0]"), "take deg.clamp(min=2)"),
    "a barrier of a difference": (
        "w = torch.full((3, 3), 0.5, requires_grad=True)\nm = torch.eye(3) - w * w * 4\n"
        "(-torch.logdet(m)).backward()\n",
        DOMAIN,
    ),
    "the same by hand": (
        "w = torch.full((3, 3), 0.5, requires_grad=True)\nm = torch.eye(3) - w * w * 4\n"
        "(-torch.log(torch.det(m))).backward()\n",
        DOMAIN,
    ),
    "a flow": (
        "w = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)\nx = torch.randn(4, 2)\n"
        "((x @ w).square().mean() - torch.logdet(w)).backward()\n",
        MAGNITUDE,
    ),
    "a Jacobian": (
        "x = torch.randn(2)\nw = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)\n"
        "j = torch.func.jacrev(lambda u: w @ u)(x)\ntorch.logdet(j).backward()\n",
        MAGNITUDE,
    ),
    "a precision matrix": (
        "s = torch.eye(2)\np = torch.tensor([[0.5, 2.0], [2.0, 0.5]], requires_grad=True)\n"
        "(torch.trace(s @ p) - torch.logdet(p)).backward()\n",
        DEFINITE,
    ),
    "a symmetric matrix": (
        "a = torch.tensor([[0.5, 2.0], [2.0, 0.5]], requires_grad=True)\n"
        "c = 0.5 * (a + a.T)\ntorch.logdet(c).backward()\n",
        DEFINITE,
    ),
    "a share of a spread": (SEARCH.format("sqrt", "var = var + 0.7 * var * g"), SHARE),
    "a share that is taken away": (SEARCH.format("log", "var = var - 0.7 * g * var"), SHARE),
    "a share by addcmul": (SEARCH.format("rsqrt", "var = var.addcmul(var, g)"), SHARE),
    "an option in front of a branch": (
        PLANES.format(NEAR, BRANCHES),
        f"give `options.near`, {OPTION}, or compute `z = near * (1.0 - s) + far * s`",
    ),
    "an option alone": (
        PLANES.format(NEAR, ALONE),
        "give `options.near`, which is 0 (",
    ),
    "an option that fills": (
        PLANES.format("torch.full((4, 1), options.near)", ALONE),
        "give `options.near`, which is 0 (",
    ),
    "a triangle behind an exponential": (
        LAGS.format("torch.tril(b * torch.exp(-b * lag), diagonal=-1)"),
        "exp (script.py:8), which made inf, (-b * lag).tril(-1)",
    ),
    "the other triangle": (
        LAGS.format("(b * torch.exp(b * lag)).triu()"),
        "exp (script.py:8), which made inf, (b * lag).triu()",
    ),
    "rows that are chosen behind it": (
        LAGS.format("(b * torch.exp(-b * lag))[torch.arange(1, 40), torch.arange(39)]"),
        "put a mask before the arithmetic",
    ),
    "Sinkhorn of numbers that vanish": (
        SINKHORN.format(
            "    k = k / k.sum(dim=1, keepdim=True)\n    k = k / k.sum(dim=2, keepdim=True)\n"
        ),
        "normalise in logarithms",
    ),
    "a difference in a quotient": (
        CONTRAST.format("(neg - 4 * pos) / 0.9", "pos / (pos + ng)"),
        "bound `ng`, which sub (script.py:8) makes negative",
    ),
    "a difference in a product": (
        CONTRAST.format("neg - 4 * pos", "(ng * pos)"),
        "bound `ng`, which sub (script.py:8) makes negative",
    ),
    "a count that is missing": (
        COUNTS.format("torch.lgamma(y + r) - torch.lgamma(y + 1) + y * r.log()"),
        "a count is -1 in the data",
    ),
    "squares that are kept by rows": (ROWS.format("denom[:, None]"), "kept from step to step"),
    "labels that repeat": (
        "logp = torch.randn(4, 1, 5, requires_grad=True).log_softmax(2)\n"
        "F.ctc_loss(logp, torch.tensor([[1, 1, 2, 2]]), torch.tensor([4]), torch.tensor([4]))"
        ".backward()\n",
        "drop samples with labels + repeats > frames before training",
    ),
}

TWINS = {
    "data below 0": (
        VARIANCES.format(
            "[1e-7, 0.1, 0.1]", "h.append(omega + drift[t] + beta * h[-1])", "path().log()"
        ),
        "keep omega positive",
    ),
    "a row of padding": (
        CAUSAL.format("torch.tril(torch.ones(5, 5))", "(m == 0) | (torch.arange(5) < 2)"),
        "leave each row its own entry",
    ),
    "a later row": (
        CAUSAL.format("torch.tril(torch.ones(5, 5), diagonal=-1); m[0, 0] = 1; m[2] = 0", "m == 0"),
        "leave each row its own entry",
    ),
    "a stock of which nothing is learned": (
        EPIDEMIC.format(0.96).replace(", requires_grad=True", "").replace(".backward()", ".item()"),
        "keep s above 0",
    ),
    "states that cannot be": (
        MARKOV.format(40, "").replace(
            "torch.exp(-0.5 * (x[..., None] - mu) ** 2)",
            "torch.relu(9 - (x[..., None] - mu).abs())",
        ),
        "work in logs from exp",
    ),
    "a table that holds it": (
        STORE.format("float32", 7e4, "store.copy_(x / 0)"),
        "scale what is written",
    ),
    "a number that no tanh made": (
        ACTIONS.format(9, "u.clamp(-1, 1)"),
        "keep u, of which",
    ),
    "a sum that is no window": (
        FRAMES.format("add((win ** 2).expand(T, n)) * x.relu()"),
        "pad by half a window",
    ),
    "a logarithm of counts alone": (GRAPH.format("s = deg.log()"), "clamp(min=2)"),
    "a singular matrix": (
        "w = torch.ones(3, 3, requires_grad=True)\ntorch.logdet(w).backward()\n",
        MAGNITUDE,
    ),
    "a negative number without a determinant": (
        "w = torch.full((3,), -0.7, requires_grad=True)\nm = 1 - 4 * w * w\n"
        "torch.log(m).sum().backward()\n",
        DOMAIN,
    ),
    "what is added is no share": (SEARCH.format("sqrt", "var = var + 0.7 * g"), SHARE),
    "a gate of features": (
        "h = torch.randn(4, 3, requires_grad=True)\ng = torch.randn(4, 3)\n"
        "(h + h * g).log().sum().backward()\n",
        SHARE,
    ),
    "zeros that are a state": (
        "w = torch.ones(3, requires_grad=True)\nn = torch.zeros(3)\n(w / n).sum().backward()\n",
        "a number above 0",
    ),
    "a number that a loop counts": (
        "w = torch.ones(3, requires_grad=True)\nfor i in range(3):\n"
        "    n = i * torch.ones(3)\n    (w / n).sum().backward()\n",
        "a number above 0",
    ),
    "a triangle of numbers that fit": (
        LAGS.format("torch.tril((b * torch.exp(b * lag)))"),
        "put the tril",
    ),
    "a softmax by hand": (
        SINKHORN.format("    pass\nk = k / k.sum(dim=1, keepdim=True)\n"),
        "normalise in logarithms",
    ),
    "a difference that is all": (
        CONTRAST.format("neg - 4 * pos", "ng"),
        "makes negative, below",
    ),
    "two parts that may be negative": (
        CONTRAST.format("neg - 4 * pos", "(ng + x[:, 1])"),
        "makes negative, below",
    ),
    "an index of 0": (
        "k = torch.tensor([0.0, 1.0], requires_grad=True)\ntorch.lgamma(k).sum().backward()\n",
        "a count is -1",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    expect_first(run_here, *FIRST[name])


@pytest.mark.parametrize("name", TWINS)
def test_the_repair_is_not_said_of_something_else(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, *TWINS[name])


def test_a_negative_determinant_is_no_singular_matrix(run_here: RunHere) -> None:
    assert "NaN (script.py:7): a negative determinant" in run_here(IMPORTS + FIRST["a flow"][0]).err
