"""Weights that grew until something overflowed: raised rates, data that nobody has scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS
from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

NET = (
    "torch.manual_seed(1)\nx, y = torch.randn(64, 4), torch.randn(64, 1)\n"
    "net = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1))\n"
)
TRAIN = (
    "opt = torch.optim.{opt}\n{schedule}\nfor step in range(400):\n"
    "    loss = F.mse_loss(net(x), y)\n    opt.zero_grad()\n    loss.backward()\n"
    "    opt.step()\n    {steps}\n"
)
SGD = "SGD(net.parameters(), lr=0.05)"
LAMBDA = "sched = torch.optim.lr_scheduler.LambdaLR(opt, {})"
HOUSES = (
    "torch.manual_seed(1)\nx = torch.stack([600 + 2400 * torch.rand(99), torch.rand(99)], 1)\n"
    "y = 0.1 * x.sum(1, keepdim=True)\n"
)
DESCENT = (
    "w = torch.zeros(2, 1, requires_grad=True)\nb = torch.zeros(1, requires_grad=True)\nlr = {lr}\n"
    "for step in range(200):\n    loss = (({product} - y) ** 2).mean()\n    loss.backward()\n"
    "    with torch.no_grad():\n        w -= lr * w.grad\n        b -= lr * b.grad\n"
    "        w.grad.zero_()\n        b.grad.zero_()\n"
)

FIRST = {
    "a warm-up without an end": (
        NET
        + TRAIN.format(
            opt=SGD,
            schedule="def warm(step):\n    return (step + 1) / 10\n" + LAMBDA.format("warm"),
            steps="sched.step()",
        ),
        "that SGD was given: LambdaLR set it, by `warm` (script.py:9)",
    ),
    "a factor that is above 1": (
        NET
        + TRAIN.format(
            opt=SGD,
            schedule="sched = torch.optim.lr_scheduler.ExponentialLR(opt, 1.1)",
            steps="sched.step()",
        ),
        "that SGD was given: ExponentialLR set it",
    ),
    "a rate that the loop multiplies": (
        NET
        + TRAIN.format(
            opt=SGD, schedule="", steps="opt.param_groups[0]['lr'] = 0.05 * 1.1 ** step"
        ),
        "bound the learning rate: it is",
    ),
    "houses": (
        HOUSES + "net = nn.Linear(2, 1)\n" + TRAIN.format(opt=SGD, schedule="", steps="pass"),
        "scale x, such as by its mean and deviation: linear (script.py:",
    ),
    "houses, by hand": (
        HOUSES + DESCENT.format(lr=0.01, product="x @ w + b"),
        "scale x, such as by its mean and deviation: matmul (script.py:",
    ),
    "houses, by a weight without a module": (
        HOUSES + "w = torch.zeros(2, requires_grad=True)\nopt = torch.optim.SGD([w], lr=0.01)\n"
        "for step in range(200):\n    opt.zero_grad()\n"
        "    F.mse_loss(x @ w, y[:, 0]).backward()\n    opt.step()\n",
        "scale x, such as by its mean and deviation: matmul (script.py:",
    ),
    "houses, in a function": (
        HOUSES
        + "def predict(z, w):\n    return torch.mm(z, w)\n"
        + DESCENT.format(lr=0.01, product="predict(x, w) + b"),
        "such as by its mean and deviation: mm (script.py:",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_what_made_them_grow_is_told_first(run_here: RunHere, name: str) -> None:
    expect_first(run_here, *FIRST[name])


TWINS = {
    "a rate that was given": (
        NET + TRAIN.format(opt=SGD.replace("0.05", "9.0"), schedule="", steps="pass"),
        "bound the learning rate",
    ),
    "a warm-up that ends": (
        NET
        + TRAIN.format(
            opt=SGD.replace("0.05", "9.0"),
            schedule=LAMBDA.format("lambda step: min(1.0, (step + 1) / 5)"),
            steps="sched.step()",
        ),
        "bound the learning rate",
    ),
    "one cycle": (
        NET
        + TRAIN.format(
            opt=SGD,
            schedule="sched = torch.optim.lr_scheduler.OneCycleLR(opt, 9, 500, div_factor=1e4)",
            steps="sched.step()",
        ),
        "bound the learning rate",
    ),
    "a rate that is too large": (
        HOUSES + "x = (x - x.mean(0)) / x.std(0)\n" + DESCENT.format(lr=3.0, product="x @ w + b"),
        "scale x",
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, *TWINS[name])


def test_samples_that_are_finite_by_chance_do_not_blame_the_data(run_here: RunHere) -> None:
    """All come near to what the dtype holds: the weights are too large."""
    text = NET + "net[0].weight.data *= 1e20\nnet[1].weight.data *= 1e20\nx[:9] *= {}\n"
    text += "(net(x) - y).sum().backward()\n"
    ran = run_here(IMPORTS + text.format("1e-3"))
    assert ran.status == 3
    assert "in the place of" not in ran.err, ran.err
    assert ": the data" in run_here(IMPORTS + text.format("1e-15")).err


def test_the_number_of_a_batch_without_an_optimizer(run_here: RunHere) -> None:
    """It is that of the backward."""
    ran = run_here(IMPORTS + HOUSES + DESCENT.format(lr=0.01, product="x @ w + b"))
    passes = int(ran.err.split("Detected inf/nan during batch_number=")[1].split()[0])
    assert passes > 2
    counted = DESCENT.format(lr=0.01, product="x @ w + b").replace("200", str(passes))
    assert run_here(IMPORTS + HOUSES + counted).status == 0


def test_infinities_of_two_kinds_are_told_apart(run_here: RunHere) -> None:
    """Those whose divisor is 0 are no overflow."""
    text = "d = torch.tensor([3e-42, 0.0, 1e-42, 2.0, 0.0])\nprint((0.5 / d).sum().item())\n"
    ran = run_here(IMPORTS + text)
    assert "(likewise in 1 more; in 2 more elements it is inf in float64, too)" in ran.err, ran.err


def test_ones_like_makes_nothing_larger(run_here: RunHere) -> None:
    """It reads a shape."""
    text = (
        "x = torch.full((4,), 0.01)\nu = torch.ones_like(x) * 1e30\nprint((u * u).sum().item())\n"
    )
    ran = run_here(IMPORTS + text)
    assert ran.status == 3
    assert "ones_like" not in ran.err.split("Detected")[0]
