"""Zeros and growths whose reason is a word of the program: a dimension, a sign, an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ntorch.manual_seed(0)\n"
CHAIN = "trans = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])\n"

# A recursion whose rows are samples, normalised over these; and what is said of it.
ACROSS = {
    "a scaled recursion": (
        CHAIN + "a = torch.tensor([[1.0, 0, 0]] * 4)\nfor k in range(3):\n"
        "    if k > 0:\n        a = (a @ trans) * 0.9\n"
        "    total = a.sum(dim=0, keepdim=True)\n    a = a / total\nprint(a.sum().item())\n",
        "sum `a` over dim=1, not dim=0 (script.py:10): `a @ trans` (script.py:9)",
    ),
    "in a method, by matmul": (
        "class Filter:\n    def __init__(self, t):\n        self.t = t\n"
        "    def run(self, belief, n):\n        for _ in range(n):\n"
        "            belief = torch.matmul(belief, self.t)\n"
        "            belief = belief / belief.sum(0)\n        return belief\n"
        + CHAIN
        + "print(Filter(trans).run(torch.tensor([[0.0, 1, 0]] * 2), 3).sum().item())\n",
        "sum `belief` over dim=1, not dim=0 (script.py:11): `torch.matmul(belief, self.t)`",
    ),
    "of three dimensions": (
        CHAIN + "p = torch.zeros(2, 4, 3)\np[:, :, 1] = 1\nn = 0\nwhile n < 3:\n"
        "    p = p @ trans\n    p = p / torch.sum(p, dim=1, keepdim=True)\n    n += 1\n"
        "print(p.sum().item())\n",
        "sum `p` over dim=2, not dim=1 (script.py:11): `p @ trans` (script.py:10)",
    ),
    "by a negative dimension, with another name": (
        CHAIN + "s = torch.tensor([[0.0, 0, 1]] * 2)\nfor _ in range(3):\n"
        "    new = s.mm(trans)\n    c = new.sum(-2, keepdim=True)\n    s = new / c\n"
        "print(s.sum().item())\n",
        "sum `new` over dim=-1, not dim=-2 (script.py:9): `s.mm(trans)` (script.py:8)",
    ),
    "with a model's weights": (
        "class Walk(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.eye(3))\n    def forward(self, h):\n"
        "        for _ in range(2):\n            h = torch.relu(h @ self.w)\n"
        "            h = h / h.sum(axis=0)\n        return h\n"
        "Walk()(torch.tensor([[1.0, 0, 2], [1, 0, 1]]))\n",
        "sum `h` over dim=1, not dim=0 (script.py:12): `h @ self.w` (script.py:11)",
    ),
}
ALONG = {
    "columns that a matrix multiplies": CHAIN
    + "v = torch.tensor([[1.0, 0], [0, 0], [0, 0]])\nfor _ in range(3):\n"
    "    v = trans @ v\n    v = v / v.sum(dim=0)\nprint(v.sum().item())\n",
    "the right dimension": CHAIN
    + "a = torch.tensor([[1.0, 0, 0], [0, 0, 0]])\nfor _ in range(3):\n"
    "    a = a @ trans\n    a = a / a.sum(dim=1, keepdim=True)\nprint(a.sum().item())\n",
    "one vector": CHAIN
    + "a = torch.zeros(3)\nfor _ in range(3):\n    a = a @ trans\n    a = a / a.sum(dim=0)\n"
    "print(a.sum().item())\n",
    "no product": "k = torch.tensor([[1.0, 0], [1, 0]])\nfor _ in range(3):\n"
    "    k = k / k.sum(0)\n    k = k / k.sum(1, True)\nprint(k.sum().item())\n",
}


def _first(run_here: RunHere, text: str) -> str:
    err = run_here(HEAD + text).err
    assert "fix: " in err, err
    first: str = err.partition("fix: ")[2].partition("\n")[0]
    return first


@pytest.mark.parametrize("name", ACROSS)
def test_a_sum_across_rows(run_here: RunHere, name: str) -> None:
    text, fix = ACROSS[name]
    assert _first(run_here, text).startswith(fix)


@pytest.mark.parametrize("name", ALONG)
def test_a_sum_along_rows(run_here: RunHere, name: str) -> None:
    assert "keeps the rows apart" not in _first(run_here, ALONG[name])


FACTORS = "v, w, h = torch.rand(6, 5), torch.rand(6, 3), torch.rand(3, 5)\nh[1] = 0\n"
UPDATES = {
    "two functions": (
        "def of_h(v, w, h):\n    num, den = 0, 0\n    num = w.T @ v\n    den = w.T @ w @ h + 0.1\n"
        "    return h * num / den\n"
        "def of_w(v, w, h):\n    up = v @ h.T\n    low = w @ (h @ h.T)\n    return w * up / low\n"
        + FACTORS
        + "h = of_h(v, w, h)\nw = of_w(v, w, h)\nprint(w.sum().item())\n",
        ", here and at script.py:9: ",
    ),
    "a loop, in place": (
        FACTORS + "for _ in range(3):\n    w *= (v @ h.t()) / (w @ h @ h.t())\n"
        "    h *= (w.t() @ v) / (w.t() @ w @ h)\nprint(w.sum().item())\n",
        ", here and at script.py:9: ",
    ),
    "by a quotient in parentheses": (
        FACTORS + "w = w * (torch.matmul(v, h.t()) / torch.matmul(w, h @ h.t()))\n"
        "print(w.sum().item())\n",
        ": ",
    ),
    "the quotient first": (
        FACTORS + "gram = h @ h.mT\nw = ((v @ h.mT) / (w @ gram)) * w\nprint(w.sum().item())\n",
        ": ",
    ),
    "a class": (
        "class Factors:\n    def __init__(self, w):\n        self.rows = w\n"
        "    def update(self, v, h):\n        rows = self.rows\n        top = v.mm(h.t())\n"
        "        bottom = rows.mm(h.mm(h.t()))\n        self.rows = rows * top / bottom\n"
        "        return self.rows\n" + FACTORS + "print(Factors(w).update(v, h).sum().item())\n",
        ": ",
    ),
}
OTHER_QUOTIENTS = {
    "responsibilities": "w, f = torch.ones(3), torch.zeros(4, 3)\n"
    "print((w * f / (w * f).sum(1, keepdim=True)).sum().item())\n",
    "Sinkhorn": "k, u = torch.zeros(3, 3), torch.ones(3)\nfor _ in range(2):\n"
    "    u = 0 * u / (k @ u)\nprint(u.sum().item())\n",
    "attention by hand": "q, s = torch.ones(2, 3), torch.zeros(2, 2)\n"
    "print((s / (q @ q.T - 3)).sum().item())\n",
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_multiplicative_update(run_here: RunHere, name: str) -> None:
    text, others = UPDATES[name]
    fix = "bound what each multiplicative update makes, by clamp(min=1e-12)"
    assert _first(run_here, text).startswith(fix + others)


@pytest.mark.parametrize("name", OTHER_QUOTIENTS)
def test_no_multiplicative_update(run_here: RunHere, name: str) -> None:
    assert "multiplicative" not in _first(run_here, OTHER_QUOTIENTS[name])


OVERWRITTEN = {
    "an interval of a class": (
        "class Gaps:\n    def __init__(self):\n        self.seen = torch.zeros(4)\n"
        "        self.gap = torch.full((4,), 1e-44)\n    def see(self, i, t):\n"
        "        self.seen[i] = float(t)\n        since = t - self.seen[i]\n"
        "        self.gap[i] = 0.5 * self.gap[i] + 0.5 * since\n"
        "gaps, at = Gaps(), torch.tensor([0, 2])\nfor t in range(9):\n    gaps.see(at, t)\n"
        "print(torch.log(gaps.gap[at]).sum().item())\n",
        "",
    ),
    "read in the class": (
        "class Gaps:\n    def __init__(self):\n        self.seen = torch.zeros(4)\n"
        "        self.gap = torch.full((4,), 1e-44)\n    def see(self, i, t):\n"
        "        self.seen[i] = float(t)\n        since = t - self.seen[i]\n"
        "        self.gap[i] = 0.5 * self.gap[i] + 0.5 * since\n    def rate(self, i):\n"
        "        return -torch.log(self.gap[i])\n"
        "gaps, at = Gaps(), torch.tensor([0, 2])\nfor t in range(9):\n    gaps.see(at, t)\n"
        "print(gaps.rate(at).sum().item())\n",
        "compute `since` (script.py:11), of which `self.gap` is made, before `self.seen[i]` is set "
        "to `t` (script.py:10)",
    ),
    "a change of a state": (
        "last, x = torch.zeros(3), torch.rand(3)\nfor _ in range(3):\n    x = x * 0.9\n"
        "    last[:] = x\n    change = x - last[:]\n    rate = 1 / change\n"
        "print(rate.sum().item())\n",
        "compute `change` (script.py:9) before `last[:]` is set to `x` (script.py:8)",
    ),
    "an attribute": (
        "class Meter:\n    def __init__(self):\n        self.before = torch.zeros(2)\n"
        "    def speed(self, now):\n        self.before = now.clone()\n"
        "        step = self.before - now\n        return now / step\n"
        "print(Meter().speed(torch.ones(2)).sum().item())\n",
        "compute `step` (script.py:10) before `self.before` is set to `now` (script.py:9)",
    ),
    "a table by name": (
        "class Clock:\n    def __init__(self):\n        self.at = {'a': torch.zeros(2)}\n"
        "    def tick(self, name, time):\n        self.at[name] = time.detach()\n"
        "        lag = time - self.at[name]\n        return torch.log(lag)\n"
        "print(Clock().tick('a', torch.ones(2)).sum().item())\n",
        "compute `lag` (script.py:10) before `self.at[name]` is set to `time` (script.py:9)",
    ),
}
IN_ORDER = {
    "the difference first": "seen, t = torch.ones(3), 1.0\nsince = t - seen[:]\nseen[:] = t\n"
    "print(torch.log(since).sum().item())\n",
    "another value since": "seen = torch.ones(3)\nt = torch.ones(3)\nseen[:] = t\nt = t * 1\n"
    "since = t - seen[:]\nprint(torch.log(since).sum().item())\n",
    "in a branch": "seen, t = torch.ones(3), torch.ones(3)\nseen[:] = t\nif t.sum() > 1:\n"
    "    seen = torch.ones(3)\nsince = t - seen[:]\nprint(torch.log(since).sum().item())\n",
    "another part": "seen, t = torch.ones(3), 1.0\nseen[0] = t\nsince = t - seen[1:]\n"
    "print(torch.log(since).sum().item())\n",
}


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_a_difference_from_what_was_overwritten(run_here: RunHere, name: str) -> None:
    text, fix = OVERWRITTEN[name]
    assert _first(run_here, text).startswith(fix)


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_difference_from_something_else(run_here: RunHere, name: str) -> None:
    assert "is set to" not in _first(run_here, IN_ORDER[name])


SYSTEM = (
    "A = torch.tensor([[1.1, 0.2], [0.0, 1.0]])\nB = torch.tensor([[0.0], [1.0]])\n"
    "Q, R = torch.eye(2), torch.eye(1)\n"
)
GAINS = {
    "Riccati": (
        SYSTEM + "P = Q.clone()\nfor _ in range(800):\n    S = R + B.T @ P @ B\n"
        "    K = torch.linalg.solve(S, B.T @ P @ A)\n"
        "    P = Q + A.T @ P @ A + A.T @ P @ B @ K\nprint(P.sum().item())\n",
        "subtract `A.T @ P @ B @ K` (script.py:12), with the gain `K`, in place of adding it",
    ),
    "Kalman, in a function": (
        "def track(F_, H, Q, R, n):\n    cov = torch.eye(2)\n    for _ in range(n):\n"
        "        cov = F_ @ cov @ F_.T + Q\n        S = H @ cov @ H.T + R\n"
        "        gain = cov @ H.T @ torch.linalg.inv(S)\n        cov = cov + gain @ H @ cov\n"
        "    return cov\n" + SYSTEM + "print(track(A, B.T, Q, R, 900).sum().item())\n",
        "subtract `gain @ H @ cov` (script.py:11), with the gain `gain`, in place of adding it to",
    ),
    "by an inverse with a name, and made symmetric": (
        SYSTEM + "P = Q.clone()\nfor _ in range(900):\n    Si = (R + B.T @ P @ B).inverse()\n"
        "    K = Si @ B.T @ P @ A\n    P = A.T @ P @ A + Q - (-(A.T @ P @ B @ K))\n"
        "    P = (P + P.T) / 2\nprint(P.sum().item())\n",
        "subtract `A.T @ P @ B @ K` (script.py:12)",
    ),
    "by matmul": (
        SYSTEM + "P = Q.clone()\nfor _ in range(900):\n    S = R + B.T @ P @ B\n"
        "    K = torch.linalg.solve(S, torch.matmul(B.T @ P, A))\n"
        "    more = torch.matmul(torch.matmul(A.T, P), B)\n"
        "    P = Q + A.T @ P @ A + torch.matmul(A.T @ P @ B, K)\nprint(P.sum().item())\n",
        "subtract `torch.matmul(A.T @ P @ B, K)` (script.py:13)",
    ),
    "in a class": (
        "class Regulator:\n    def plan(self, A, B, Q, R, steps):\n        value = Q\n"
        "        for _ in range(steps):\n"
        "            law = torch.linalg.solve(R + B.T @ value @ B, B.T @ value @ A)\n"
        "            value = Q + A.T @ value @ A + law.T @ B.T @ value @ A\n        return value\n"
        + SYSTEM
        + "print(Regulator().plan(A, B, Q, R, 900).sum().item())\n",
        "subtract `law.T @ B.T @ value @ A` (script.py:10), with the gain `law`",
    ),
}
OTHER_GROWTHS = {
    "a gain with a minus": SYSTEM + "P = Q.clone()\nfor _ in range(900):\n"
    "    K = -torch.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)\n"
    "    P = 3 * (Q + A.T @ P @ A + 0.1 * A.T @ P @ B @ K)\nprint(P.sum().item())\n",
    "Lyapunov's equation": SYSTEM
    + "P = Q.clone()\nfor _ in range(900):\n    P = Q + 1.5 * A.T @ P @ A\nprint(P.sum().item())\n",
    "a closed loop": SYSTEM + "P = Q.clone()\nfor _ in range(900):\n"
    "    K = torch.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)\n    C = A - B @ K\n"
    "    P = 2 * (Q + K.T @ R @ K + C.T @ P @ C + P)\nprint(P.sum().item())\n",
}


@pytest.mark.parametrize("name", GAINS)
def test_a_gain_that_is_added(run_here: RunHere, name: str) -> None:
    text, fix = GAINS[name]
    assert _first(run_here, text).startswith(fix)


@pytest.mark.parametrize("name", OTHER_GROWTHS)
def test_no_gain_that_is_added(run_here: RunHere, name: str) -> None:
    assert "with the gain" not in _first(run_here, OTHER_GROWTHS[name])
