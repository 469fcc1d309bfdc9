"""``fxguard run`` of scripts that compute under ``torch.func``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxguard.script.transforms import MOST_KNOWN, Transforms

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = "import torch\nfrom torch import nn\nfrom torch.func import *\ntorch.manual_seed(0)\n"

SOLUTION = (
    "net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))\n"
    "def u(x):\n"
    "    r = torch.sqrt(x[0] ** 2 + x[1] ** 2)\n"
    "    return net(x).squeeze() * r\n"
)
TRAINS = (
    "opt = torch.optim.Adam(net.parameters(), 1e-3)\n"
    "points = torch.rand(8, 2)\npoints[3] = 0\n"
    "for step in range(2):\n"
    "    loss = vmap(residual)(points).pow(2).mean()\n"
    "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n    print(loss.item())\n"
)

# What is wrong, and the first line of the verdict.
WRONG = {
    "vmap": (
        "def f(x):\n"
        "    y = x - x.mean()\n"
        "    return y / y.std()\n"
        "print(vmap(f)(torch.ones(4, 3)).sum().item())\n",
        "div made NaN (script.py:7): 0 / 0",
    ),
    "a result that is only printed": (
        "def f(x):\n    return torch.log(x - x)\nprint(vmap(f)(torch.ones(4, 3)))\n",
        "log made -inf (script.py:6): log of zero",
    ),
    "other dimensions": (
        "def f(x):\n"
        "    return (x - x) / (x - x).sum()\n"
        "z = vmap(f, in_dims=1, out_dims=1)(torch.ones(4, 3))\n"
        "z.mean().item()\n",
        "div made NaN (script.py:6)",
    ),
    "a backward": (
        "def loss(w, x):\n"
        "    s = (w * x).pow(2).sum()\n"
        "    return s.sqrt()\n"
        "g = grad(loss)(torch.zeros(3), torch.ones(3))\n"
        "g.sum().item()\n",
        "backward of sqrt made inf (script.py:7)",
    ),
    "a backward for each example": (
        "def loss(w, x):\n"
        "    s = (w * x).pow(2).sum()\n"
        "    return s.sqrt()\n"
        "g = vmap(grad(loss), in_dims=(None, 0))(torch.zeros(3), torch.ones(4, 3))\n"
        "g.sum().item()\n",
        "backward of sqrt made inf (script.py:7)",
    ),
    "a Jacobian": (
        "def f(w):\n    return torch.log(w).sqrt()\nprint(jacrev(f)(torch.ones(2)).sum().item())\n",
        "backward of sqrt made NaN (script.py:6)",
    ),
    "forward mode": (
        "def f(w):\n    return (w - w) / (w - w).sum()\n"
        "print(jvp(f, (torch.ones(2),), (torch.ones(2),))[0].sum().item())\n",
        "div made NaN (script.py:6)",
    ),
    "a derivative of forward mode": (
        "def f(w):\n    return (w * w).sum().sqrt() * w.sum()\n"
        "print(jacfwd(f)(torch.zeros(2)).sum().item())\n",
        "derivative of sqrt made NaN (script.py:6): its derivative is infinite there",
    ),
    "a derivative of samples": (
        "def f(w):\n    return torch.acos(w).sum()\n"
        "print(vmap(jacfwd(f))(torch.ones(4, 2)).sum().item())\n",
        "derivative of acos made",
    ),
    "a pushforward": (
        "def f(w):\n    h = w.relu()\n    return h.sqrt()\n"
        "print(jvp(f, (-torch.ones(3),), (torch.ones(3),))[1].sum().item())\n",
        "derivative of sqrt made",
    ),
    "a second derivative": (
        "def f(w):\n    return w.pow(1.5).sum()\nprint(hessian(f)(torch.zeros(2)).sum().item())\n",
        "derivative of backward of pow made",
    ),
    "a backward of a second derivative": (
        "def f(w):\n    return w.square().sum().sqrt()\n"
        "print(hessian(f)(torch.zeros(2)).sum().item())\n",
        "backward of sqrt made inf (script.py:6): its derivative is infinite there",
    ),
    "a gradient of a gradient": (
        "def f(w):\n    return (w.abs() + 0.0).pow(1.5) + w\n"
        "print(vmap(grad(grad(f)))(torch.linspace(0, 1, 4)).sum().item())\n",
        "backward of backward of pow made NaN (script.py:6)",
    ),
    "a gradient of a gradient of a module": (
        "net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))\n"
        "params = dict(net.named_parameters())\n"
        "def u(p, x):\n"
        "    return functional_call(net, p, (x[None],))[0] * (x + 0.0) ** 1.5\n"
        "def residual(p, x):\n    return grad(grad(u, 1), 1)(p, x)\n"
        "opt = torch.optim.SGD(net.parameters(), 1e-2)\n"
        "for step in range(2):\n"
        "    x = torch.linspace(0, 1, 4)\n"
        "    loss = vmap(residual, (None, 0))(params, x).square().mean()\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n    print(loss.item())\n",
        "backward of backward of pow made inf (script.py:8)",
    ),
    "a loss that transforms made of a module": (
        f"{SOLUTION}def residual(x):\n    return torch.trace(hessian(u)(x))\n{TRAINS}",
        "backward of sqrt made",
    ),
    "a gradient of a module": (
        f"{SOLUTION}def residual(x):\n    return grad(u)(x).sum()\n{TRAINS}",
        "backward of sqrt made",
    ),
    "a Jacobian of a module in forward mode": (
        f"{SOLUTION}def residual(x):\n    return jacfwd(u)(x).sum()\n{TRAINS}",
        "derivative of sqrt made NaN (script.py:7): its derivative is infinite there",
    ),
    "behind a transform": (
        "def loss(w, x):\n"
        "    return (w * x).relu().sum()\n"
        "g = vmap(grad(loss), in_dims=(None, 0))(-torch.ones(3), torch.ones(4, 3))\n"
        "scale = 1 / g.norm(dim=1)\n"
        "(g * scale[:, None]).mean().item()\n",
        "div made inf (script.py:8): division by zero",
    ),
    "what goes in": (
        "x = torch.zeros(3, 2)\nx = x / x.sum()\nprint(vmap(torch.sin)(x).sum().item())\n",
        "div made NaN (script.py:6): 0 / 0",
    ),
    "weights that a call is given": (
        "net = nn.Linear(1, 1)\n"
        "params = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}\n"
        "def loss(p, x, y, mask):\n"
        "    return ((functional_call(net, p, (x[:, None],))[:, 0] - y) ** 2 * mask).sum()\n"
        "def task(p, x, y, mask):\n"
        "    mean = (y * mask).sum() / mask.sum()\n"
        "    var = (mask * (y - mean) ** 2).sum() / (mask.sum() - 1)\n"
        "    y = (y - mean) / (var + 1e-6).sqrt()\n"
        "    for _ in range(2):\n"
        "        g = grad(loss)(p, x, y, mask)\n"
        "        p = {k: v - 0.1 * g[k] for k, v in p.items()}\n"
        "    return loss(p, x, y, mask)\n"
        "masks = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0]])\n"
        "for step in range(3):\n"
        "    x = torch.randn(1, 3)\n"
        "    mask = masks[step : step + 1]\n"
        "    batched = vmap(task, in_dims=(None, 0, 0, 0))(params, x, x.sin(), mask).mean()\n"
        "    batched.backward()\n"
        "    print(batched.item())\n",
        "div made NaN (script.py:11): 0 / 0",
    ),
    "weights that another model has made": (
        "net, hyper = nn.Linear(4, 8), nn.Linear(2, 32)\n"
        "nn.init.zeros_(hyper.weight)\n"
        "nn.init.zeros_(hyper.bias)\n"
        "w = hyper(torch.rand(2)).view(8, 4)\n"
        "w = w / w.norm(dim=1, keepdim=True)\n"
        "print(functional_call(net, {'weight': w}, (torch.rand(3, 4),)).sum().item())\n",
        "div made NaN (script.py:9): 0 / 0",
    ),
    "weights of a step of one's own": (
        "net = nn.Linear(2, 1)\n"
        "params = {k: v.detach() for k, v in net.named_parameters()}\n"
        "for step in range(3):\n"
        "    rate = torch.tensor(0.0) / step if step != 1 else torch.tensor(0.1)\n"
        "    params = {k: v - rate * v for k, v in params.items()}\n"
        "    print(functional_call(net, params, (torch.ones(3, 2),)).sum().item())\n",
        "div made NaN (script.py:8): 0 / 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_made_it_is_named(run_here: RunHere, name: str) -> None:
    """With the operation, or the one whose backward it was, and the line inside the transform."""
    text, verdict = WRONG[name]
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert ran.err.splitlines()[0].startswith(verdict)


CLICKS = (
    "def gain(rel):\n    return (2.0**rel - 1).sum()\n"
    "def loss(w, x, rel):\n    s = (x @ w).log_softmax(-1)\n    return -({}).sum()\n"
    "X, rel = torch.randn(6, 5, 3), (torch.rand(6, 5) > 0.5).float()\nrel[4] = 0\n"
    "w = torch.zeros(3)\n{}\nprint(w.sum().item())\n"
)
ONE_BY_ONE = "for x, r in zip(X, rel):\n    w = w - 0.1 * grad(loss)(w, x, r)"
ALL = "w = w - 0.1 * vmap(grad(loss), (None, 0, 0))(w, X, rel).mean(0)"
SINC = (
    "def rotate(w):\n    theta = w.norm()\n    small = theta < 1e-6\n"
    "    return w * torch.where(small, 1 - theta**2 / 6, torch.sin(theta) / theta)\n"
    "J = {}\nprint(J.sum().item())\n"
)
DISTANCE = (
    "def loss(w, x, y):\n    return ((x - w).square().sum().sqrt() - y) ** 2\n"
    "X, Y = torch.randn(8, 3), torch.rand(8)\nX[5] = 0\nw = torch.zeros(3)\n"
    "w = w - 0.01 * vmap(grad(loss), (None, 0, 0))(w, X, Y).mean(0)\nprint(w.sum().item())\n"
)
CHOSEN = "choose a safe argument of div by where, too, such as torch.where(small, 1, theta)"
LOOKED_AT = {  # script, numbers, fix
    "one after the other": (
        CLICKS.format("s * rel * (1.0 / gain(rel))", ONE_BY_ONE),
        "1 / 0.0",
        "choose the divisor d = gain(rel) by where(d == 0, 1, d)",
    ),
    "samples": (
        CLICKS.format("s * (2.0**rel - 1) / gain(rel)", ALL),
        "at [0]: -0.0 / 0.0",
        "choose the divisor d = gain(rel) by where(d == 0, 1, d)",
    ),
    "a Jacobian": (
        SINC.format("jacrev(rotate)(torch.zeros(3))"),
        "0.0 / 0.0; grad of output",
        CHOSEN,
    ),
    "a backward": (
        SINC.format("grad(lambda w: rotate(w).sum())(torch.zeros(3))"),
        "0.0 / 0.0; grad of output",
        CHOSEN,
    ),
    "a pullback": (
        SINC.format("vjp(rotate, torch.zeros(3))[1](torch.ones(3))[0]"),
        "0.0 / 0.0; grad of output",
        CHOSEN,
    ),
    "a backward for each sample": (DISTANCE, "sqrt(0.0); grad of output -", "+ 1e-12)"),
    "a Jacobian in forward mode": (
        "def f(w):\n    return (w * w).sum().sqrt()\n"
        "print(jacfwd(f)(torch.zeros(2)).sum().item())\n",
        "  sqrt(0.0)\n",
        "sqrt((w * w).sum() + 1e-12)",
    ),
    "a Jacobian for each sample": (
        "def f(w):\n    return torch.sqrt(w[0] ** 2 + w[1] ** 2)\n"
        "x = torch.rand(5, 2)\nx[2] = 0\nprint(vmap(jacrev(f))(x).sum().item())\n",
        "  sqrt(0.0); grad of output 1.0",
        "sqrt(w[0] ** 2 + w[1] ** 2 + 1e-12)",
    ),
    "samples of samples": (
        "def f(x, y):\n    return (x - y) / (x - y).abs()\n"
        "x = torch.arange(3.0)\nprint(vmap(vmap(f, (None, 0)), (0, None))(x, x).sum().item())\n",
        "  0.0 / 0.0",
        "choose the divisor",
    ),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_its_numbers_and_fix_are_told(run_here: RunHere, name: str) -> None:
    """As outside of transforms. Of samples, the numbers are those of the first bad one."""
    text, numbers, fix = LOOKED_AT[name]
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert numbers in ran.err, ran.err
    assert fix in ran.fixes[0], ran.fixes


def test_numbers_inside_are_of_one_sample(run_here: RunHere) -> None:
    """The gradient that came in is that of the sample in which it turned bad."""
    ran = run_here(HEAD + DISTANCE)
    y = float(ran.err.split("grad of output ")[1].split(",")[0]) / -2
    torch.manual_seed(0)
    _, expected = torch.randn(8, 3), torch.rand(8)
    assert y == pytest.approx(float(expected[5]), rel=1e-3)


def test_numbers_of_a_backward_that_reached_nothing(run_here: RunHere) -> None:
    """They are not told of a later one of the same line."""
    text = (
        "def loss(w, x):\n    return ((x - w).square().sum() + 0 * x[0]).sqrt()\n"
        "w, x = torch.zeros(3), torch.zeros(3)\n"
        "g = torch.where(x == 0, 0.0, grad(loss)(w, x))\n"
        "g = 5 * grad(lambda w, x: loss(w, x) * 7)(w, x) + g\nprint(g.sum().item())\n"
    )
    ran = run_here(HEAD + text)
    assert ran.err.startswith("backward of sqrt made inf (script.py:6)"), ran.err
    assert "grad of output 1.0" not in ran.err


def test_random_numbers_of_samples(run_here: RunHere) -> None:
    """A second draw may be others: the operation is named, and no numbers are told."""
    text = (
        "def loss(w, x):\n    d = torch.nn.functional.dropout(x - w, 0.5)\n"
        "    return d.square().sum().sqrt()\n"
        "each = vmap(grad(loss), (None, 0), randomness='different')\n"
        "print(each(torch.zeros(3), torch.zeros(4, 3)).sum().item())\n"
    )
    ran = run_here(HEAD + text)
    assert ran.err.startswith("backward of sqrt made"), ran.err
    assert "grad of output" not in ran.err.splitlines()[2], ran.err


def test_the_sample_of_samples_is_the_first_bad_one(run_here: RunHere) -> None:
    """Its operands are those of one pair."""
    text = (
        "def f(x, y):\n    return torch.log(x * y - 6)\n"
        "x, y = torch.tensor([4.0, 2.0]), torch.tensor([5.0, 3.0])\n"
        "print(vmap(vmap(f, (None, 0)), (0, None))(x, y).sum().item())\n"
    )
    ran = run_here(HEAD + text)
    assert ran.err.startswith("log made -inf (script.py:6): log of zero"), ran.err
    assert "  log(0.0)" in ran.err


RIGHT = {
    "per-example gradients": "w = torch.randn(3)\n"
    "def loss(w, x):\n"
    "    return torch.nn.functional.dropout((w * x).sum().tanh() ** 2, 0.5)\n"
    "for _ in range(20):\n"
    "    g = vmap(grad(loss), in_dims=(None, 0), randomness='different')(w, torch.randn(5, 3))\n"
    "    w = w - 0.1 * g.mean(0)\n"
    "print(w.tolist(), torch.rand(1).item())\n",
    "a module": "net = nn.Linear(3, 1)\n"
    "params = {k: v.detach() for k, v in net.named_parameters()}\n"
    "def loss(p, x):\n"
    "    return functional_call(net, p, (x,)).pow(2).mean()\n"
    "for _ in range(3):\n"
    "    g = grad(loss)(params, torch.randn(4, 3))\n"
    "    params = {k: v - 0.1 * g[k] for k, v in params.items()}\n"
    "print([v.tolist() for v in params.values()])\n",
    "Hessians": "print(hessian(lambda x: (x ** 3).sum())(torch.arange(3.0)).tolist())\n",
    "an intended mask": "def f(x):\n"
    "    return x.masked_fill(x > 0, -float('inf')).softmax(-1)\n"
    "print(vmap(f)(torch.tensor([[1.0, -1.0, -2.0]])).sum().item())\n",
    "a derivative that is left out": "def f(x):\n"
    "    return torch.where(x > 0, x.abs().sqrt(), x).sum()\n"
    "print(jvp(f, (torch.tensor([0.0, 1.0]),), (torch.ones(2),))[1].item())\n",
    "a loss of a module": f"{SOLUTION}def residual(x):\n    return torch.trace(hessian(u)(x))\n"
    + TRAINS.replace("points[3] = 0", "points += 1"),
    "what is left out": "def f(x):\n"
    "    return torch.where(x > 0, x.log(), 0.0)\n"
    "print(vmap(f)(torch.tensor([0.0, 1.0])).sum().item())\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_ends_as_ever(ends_as_ever: EndsAsEver, name: str) -> None:
    """With the same numbers and the same random numbers."""
    assert "nothing found" in ends_as_ever(HEAD + RIGHT[name])


# Operations of two chains that lead to one another, many steps after the first bad number.
LONG_AFTER = """
def loss(w, x, y):
    h = torch.tanh(x @ w["a"] + w["b"])
    return torch.relu(1 - y * (h @ w["c"] + w["d"]))
each = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
def step(w, x, y, add):
    found, losses = each(w, x, y)
    square = torch.stack([g.reshape(8, -1).pow(2).sum(1) for g in found.values()]).sum(0)
    scale = 1 / (square + add).sqrt()
    made = {}
    for name, g in found.items():
        scaled = g * scale.view(-1, *[1] * (g.dim() - 1))
        made[name] = (scaled.sum(0) + 0.1 * torch.randn_like(scaled[0])) / 8
    return made, losses.mean()
w = {"a": torch.randn(4, 8), "b": torch.zeros(8), "c": torch.randn(8), "d": torch.zeros(())}
v = {name: torch.zeros_like(p) for name, p in w.items()}
x, y = torch.randn(64, 4), torch.ones(64)
for turn in range(120):
    at = torch.randint(0, 64, (8,))
    made, mean = step(w, x[at], y[at], turn < 2)
    for name in w:
        v[name] = 0.9 * v[name] + made[name]
        w[name] = w[name] - 0.3 * v[name]
    if turn % 50 == 49:
        print((torch.tanh(x @ w["a"]) @ w["c"]).sign().mean().item())
        print(mean.item())
"""


def test_what_was_bad_long_before_is_led_back(run_here: RunHere) -> None:
    """Nothing that only handed it on is blamed, and nothing is taken for given."""
    ran = run_here(HEAD + LONG_AFTER)
    assert ran.err.startswith("div made inf (script.py:13): division by zero\n")
    assert "has not seen" not in ran.err


def test_an_exception_inside_is_that_of_the_script(run_here: RunHere) -> None:
    """It ends the script with its own status."""
    ran = run_here(HEAD + "vmap(lambda x: x @ torch.ones(7))(torch.ones(2, 3))\n")
    assert ran.status == 1
    assert "fxguard/" not in ran.err


def test_nothing_is_kept_of_what_ran_inside() -> None:
    """No tensor, however long it goes on; what is in the memory of another is not taken for it."""
    transforms = Transforms(lambda tensor: None, lambda record: record, print, print)
    x = torch.ones(3)
    for _ in range(MOST_KNOWN + 10):
        y = x * 2
        transforms.look(torch.mul, (x, 2), {}, y)
    assert transforms.of(y) is not None
    assert transforms.of(y[:2]) is not None
    y.add_(1)
    assert transforms.of(y) is None
    assert len(transforms._records) <= MOST_KNOWN + 1
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
