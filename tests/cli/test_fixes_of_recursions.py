"""What ``fxguard run`` proposes first of recursions, eigenvalues, errors of 0, CTC and norms.

Each rule has neighbours, which are written in other ways, and twins that need something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

CELL = (
    "class Cell(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.gates = nn.Linear(3, 8)\n    def forward(self, x, c):\n{}"
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.cell = Cell()\n    def forward(self, x):\n        c = torch.ones(2, 4)\n"
    "        for t in range(90):\n            c = self.cell(x, c)\n        return c.mean()\n"
    "Net()(torch.ones(2, 3) * 9).backward()\n"
)
GATE = "keep the factor that {} makes at most 1, by sigmoid in its place; or carry the largest"
FILTER = (
    "r = torch.tensor([1.4, 0.5], requires_grad=True)\nx = torch.randn(300)\n"
    "a, b = 2 * r * 0.8, {}\ny1 = y2 = torch.zeros(2)\nout = []\nfor t in range(300):\n"
    "    y = {}\n    out.append(y.sum())\n    y2, y1 = y1, y\n"
    "(torch.stack(out) ** 2).mean().backward()\n"
)
POLES = (
    "keep the poles of this recursion (script.py:{}) inside the unit circle, by q = tanh(u) and "
    "p = (1 - q) * tanh(v) of free u and v, with p = {}, q = {}"
)
# A filter in a module, and how a turn of it is written.
FORMS = (
    "class Filter(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a = nn.Parameter(torch.tensor([-1.9, 1.4]))\n"
    "        self.b = nn.Parameter(torch.tensor([0.5, 0.1, 0.1]))\n    def forward(self, x):\n"
    "        a, b, out = self.a, self.b, []\n        s1 = s2 = torch.zeros(x.shape[0])\n"
    "        for n in range(x.shape[1]):\n            {}\n            out.append(y)\n"
    "        return torch.stack(out, 1)\n"
    "(Filter()(torch.randn(2, 300)) ** 2).mean().backward()\n"
)
TRANSPOSED = (
    "y = b[0] * x[:, n] + s1\n            s1 = b[1] * x[:, n] - a[0] * y + s2\n"
    "            s2 = b[2] * x[:, n] - a[1] * y"
)
DIRECT = (
    "w = x[:, n] - a[0] * s1 - a[1] * s2\n            y = b[0] * w + b[1] * s1 + b[2] * s2\n"
    "            s2, s1 = s1, w"
)
STATES = "y = s1 + s2\n            s1, s2 = 1.5 * s1 - a[1] * s2 + x[:, n], s1 + 0.5 * s2"
MATRIX = (
    "u = torch.linalg.qr(torch.randn(6, 6))[0]\n"
    "m = (u * torch.tensor([5, 4, 3, 2, 0, -1e-6])) @ u.T\nm = ((m + m.T) / 2).requires_grad_()\n"
)
SHARE = "bound the eigenvalues by a share of the largest, "
CTC = (
    "p = torch.randn({0}, 8, 5, requires_grad=True).log_softmax(-1)\nn = torch.tensor({1})\n"
    "F.ctc_loss(p, torch.ones(8, 4, dtype=torch.long), torch.full((8,), {0}), n).backward()\n"
)
BALL = (
    "class Ball(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.margin, self.w = 1e-9, nn.Parameter(torch.tensor([0.5, 3.0]))\n"
    "    def forward(self):\n        r = self.w.clamp({})\n        return torch.atanh(r).sum()\n"
    "Ball()().backward()\n"
)

FIRST = {
    "an exponential gate": (
        CELL.format("        i, f = self.gates(x).exp().chunk(2, -1)\n        return f * c + i\n"),
        GATE.format("exp (script.py:10)"),
    ),
    "an exponential gate that is added": (
        CELL.format(
            "        i, f = self.gates(x).chunk(2, -1)\n        kept = c * torch.exp(f)\n"
            "        return i.exp() + kept\n"
        ),
        GATE.format("exp (script.py:11)"),
    ),
    "a resonator": (
        FILTER.format("-r ** 2", "x[t] + a * y1 + b * y2"),
        POLES.format(11, "a", "b"),
    ),
    "a resonator with other signs": (
        FILTER.format("r * r", "x[t] - b * y2 + y1 * a"),
        POLES.format(11, "a", "-b"),
    ),
    "a biquad, transposed": (
        FORMS.format(TRANSPOSED),
        POLES.format(15, "-a[0]", "-a[1]"),
    ),
    "a biquad, direct": (FORMS.format(DIRECT), POLES.format(14, "-a[0]", "-a[1]")),
    "two states": (
        FORMS.format(STATES),
        POLES.format(15, "1.5 + 0.5", "-a[1] - 1.5 * 0.5"),
    ),
    "a power of eigenvalues": (
        f"{MATRIX}v, u = torch.linalg.eigh(m)\n((u * v ** -0.25) @ u.T).sum().backward()\n",
        f"{SHARE}v.clamp(min=1e-06 * v.amax(-1, keepdim=True))",
    ),
    "logarithms of eigenvalues": (
        f"{MATRIX}torch.linalg.eigvalsh(m).log().sum().backward()\n",
        SHARE,
    ),
    "a step by eigenvalues": (
        "class Root(torch.optim.Optimizer):\n    def __init__(self, p):\n"
        "        super().__init__(p, {})\n    @torch.no_grad()\n    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n            g = p.grad\n"
        "            vals, vecs = torch.linalg.eigh(g @ g.T)\n"
        "            root = (vecs * vals.pow(-0.5)) @ vecs.T\n            p -= 0.1 * root @ g\n"
        "net = nn.Linear(3, 9)\nopt = Root([net.weight])\nx = torch.randn(20, 3)\n"
        "for _ in range(3):\n    opt.zero_grad()\n    net(x).square().mean().backward()\n"
        "    opt.step()\nprint(net(x))\n",
        f"{SHARE}vals.clamp(min=1e-06 * vals.amax(-1, keepdim=True))",
    ),
    "a PSNR": (
        "x, y = torch.rand(3, 8), torch.rand(3, 8)\ny[1] = x[1]\nx.requires_grad_()\n"
        "mse = (x - y).square().mean(1)\n(10 * torch.log10(1 / mse)).mean().backward()\n",
        "bound the error, mse.clamp(min=1e-10): where two are equal it is 0",
    ),
    "a PSNR of a loss": (
        "x = torch.rand(3, 8, requires_grad=True)\ne = F.mse_loss(x, x.detach())\n"
        "(-10 * torch.log10(e)).backward()\n",
        "bound the error, e.clamp(min=1e-10)",
    ),
    "most samples too short": (
        CTC.format(3, "[4, 4, 2, 4, 4, 2, 1, 4]"),
        "leave the input more frames, by less stride or pooling in front of it, as 5 of 8 samples",
    ),
    "a norm of large numbers": (
        "x = torch.full((3,), 2e20, requires_grad=True)\ntorch.linalg.vector_norm(x).backward()\n",
        "divide by the largest magnitude first, m * vector_norm(x / m) with m = x.abs().amax()",
    ),
    "an arc of a quotient": (
        "w, h = torch.rand(4), torch.tensor([1.0, 2, 0, 1])\nw[2] = 0\nx = torch.rand(4)\n"
        "x.requires_grad_()\n((torch.atan(w / h) - x) ** 2).mean().backward()\n",
        "take atan2(a, b) in place of atan(a / b)",
    ),
    "a teacher of its top classes": (
        "t = torch.randn(4, 6)\nt[:, 2:] = -math.inf\nt = t.log_softmax(1)\n"
        "s = torch.randn(4, 6, requires_grad=True).log_softmax(1)\n"
        "F.kl_div(t, s, reduction='batchmean', log_target=True).backward()\n",
        "compare both where both are possible, such as on the same top-k",
    ),
    "a margin that is lost": (
        BALL.format("max=1 - self.margin"),
        "where it is made, in clamp (script.py:10), with a larger `self.margin`, such as 5e-07",
    ),
}

TWINS = {
    "a gate that is a sigmoid": (
        CELL.format(
            "        i, f = self.gates(x).chunk(2, -1)\n        return f.sigmoid() * c * 9 + i\n"
        ),
        "xLSTM",
    ),
    "an exponential of no gate": (
        "x = torch.full((3,), 80.0, requires_grad=True)\n(x.exp() * (x + 1e6)).sum().backward()\n",
        "xLSTM",
    ),
    "a recursion of the first order": (
        FILTER.format("r * r", "x[t] + a * y1"),
        "unit circle",
    ),
    "a power of something else": (
        "x = torch.tensor([4.0, 1.0, -1e-6], requires_grad=True)\n(x ** 0.5).sum().backward()\n",
        "eigenvalues",
    ),
    "an indefinite matrix": (
        "m = torch.diag(torch.tensor([5.0, 3.0, -2.0])).requires_grad_()\n"
        "torch.linalg.eigvalsh(m).log().sum().backward()\n",
        "roundings",
    ),
    "a variance of data that nobody saw": (
        "x = torch.from_numpy(np.full((3, 8), 0.5, np.float32))\n"
        "v = (x - x.mean(1, keepdim=True)).square().mean(1)\nprint((1 / v).sum())\n",
        "error",
    ),
    "a variance of nothing": (
        "x = torch.rand(3, 8)\nx[1] = 0.5\nv = (x - x.mean(1, keepdim=True)).square().mean(1)\n"
        "print((1 / v).sum())\n",
        "error",
    ),
    "one sample too short": (CTC.format(5, "[3, 3, 4, 3, 3, 2, 1, 3]"), "stride"),
    "a quotient of something else": (
        "w, h = torch.zeros(4), torch.tensor([1.0, 2, 0, 1])\nprint(torch.tanh(w / h).mean())\n",
        "atan2",
    ),
    "a target of its top classes": (
        "t = torch.randn(4, 6)\nt[:, 2:] = -math.inf\nt = t.log_softmax(1)\n"
        "s = torch.randn(4, 6, requires_grad=True).log_softmax(1)\n"
        "F.kl_div(s, t, reduction='batchmean', log_target=True).backward()\n",
        "top-k",
    ),
    "a norm that does not fit": (
        "x = torch.full((9,), 3e38, requires_grad=True)\ntorch.linalg.vector_norm(x).backward()\n",
        "largest magnitude first",
    ),
    "a margin in numbers": (BALL.format("max=1 - 1e-9"), "a larger"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_repair_comes_first(run_here: RunHere, name: str) -> None:
    text, fix = FIRST[name]
    assert fix in run_here(f"{IMPORTS}{text}").fixes[0]


@pytest.mark.parametrize("name", TWINS)
def test_the_repair_is_not_said_of_something_else(run_here: RunHere, name: str) -> None:
    text, fix = TWINS[name]
    fixes = run_here(f"{IMPORTS}{text}").fixes
    assert fixes
    assert not any(fix in each for each in fixes)


POLE_STEPS = (
    "class Filter(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a = nn.Parameter(torch.tensor(-0.4))\n"
    "        self.b = nn.Parameter(torch.tensor(0.2))\n"
    "    def forward(self, x):\n        y1 = y2 = torch.zeros(2)\n        out = []\n"
    "        for n in range(x.shape[1]):\n            y = x[:, n] - self.a * y1 - self.b * y2\n"
    "            out.append(y)\n            y1, y2 = y, y1\n        return torch.stack(out, 1)\n"
    "net = Filter()\nopt = torch.optim.SGD(net.parameters(), lr=1e8)\nfor turn in range(9):\n"
    "    loss = (net(torch.randn(2, 60)) - 1).square().mean()\n"
    "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
)


def test_poles_come_before_the_learning_rate(run_here: RunHere) -> None:
    """A step made the weights large; what keeps the filter stable does so at any rate."""
    found = run_here(IMPORTS + POLE_STEPS)
    assert found.status == 3
    assert "it was " in found.err.splitlines()[0]
    assert found.fixes[0].startswith("fix: keep the poles of this recursion (script.py:14)")
    assert found.fixes[1].startswith("or: a smaller learning rate")
