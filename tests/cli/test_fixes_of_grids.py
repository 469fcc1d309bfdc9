"""Points of a grid that begins at 0, entries of a schedule that are 0, pairs on a diagonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

SOLVES = (
    "torch.manual_seed(0)\nnet = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))\n"
    "r = {grid}\nr = r[:, None].requires_grad_()\nu = net(r)\n"
    "first = torch.autograd.grad(u.sum(), r, create_graph=True)[0]\n"
    "second = torch.autograd.grad(first.sum(), r, create_graph=True)[0]\n"
    "loss = ((second + {term}) ** 2).mean()\nloss.backward()\n"
)
SCHEDULE = (
    "betas = torch.linspace(0.01, 1.0, 8)\nalphas = 1 - betas\nbars = alphas.cumprod(0)\n"
    "x, eps = torch.randn(4, 3), torch.randn(4, 3)\n"
    "for t in reversed(range(8)):\n"
    "    x = (x - betas[t] / (1 - bars[t]).sqrt() * eps) / {divisor}\nprint(x.sum().item())\n"
)
PAIRS = (
    "x = torch.randn(7, 3, requires_grad=True)\ndiff = x[:, None] - x[None]\n"
    "dist = diff.pow(2).sum(-1{keeps}).sqrt()\n"
    "off = 1 - torch.eye(7){more}\n(dist * off).sum().backward()\n"
)

FIRST = {
    "an axis": (
        SOLVES.format(grid="torch.linspace(0, 1, 9)", term="first / r"),
        "begin linspace (script.py:7) above 0, or multiply by r what is divided by it",
    ),
    "steps from 0 on": (
        SOLVES.format(grid="torch.arange(9) * 1.0", term="first * r.reciprocal()"),
        "choose",
    ),
    "whole steps": (
        "n = torch.arange(6).float()\ns = torch.randn(6) / n\nprint(s.sum().item())\n",
        "begin arange (script.py:5) above 0, or multiply by n what is divided by it",
    ),
    "a root of a schedule's entry": (
        SCHEDULE.format(divisor="alphas[t].sqrt()"),
        "keep alphas away from 0 where it is made (script.py:6)",
    ),
    "pairs": (PAIRS.format(keeps="", more=""), "as by + torch.eye(7): each meets itself there"),
    "pairs with a kept dimension": (
        PAIRS.format(keeps=", keepdim=True", more="[..., None]"),
        "as by + torch.eye(7)[..., None]: each meets itself there",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_what_is_told_first(run_here: RunHere, name: str) -> None:
    expect_first(run_here, *FIRST[name])


TWINS = {
    "a divisor that is no point": (
        "x = torch.linspace(0, 1, 5)\nd = x.relu() * 0\nprint((x / d).sum().item())\n",
        "begin linspace",
    ),
    "a distance": (
        SOLVES.format(grid="torch.linspace(0, 1, 9)", term="first / (r - r.detach())"),
        "begin linspace",
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone(run_here: RunHere, name: str) -> None:
    expect_not_said(run_here, *TWINS[name])
