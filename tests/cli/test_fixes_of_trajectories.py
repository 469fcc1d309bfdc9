"""What ``fxguard run`` says of trajectories that diverge: the turns of one of them count."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

# Trajectories of which the last one diverges: each one prints its numbers and a line.
TRAJECTORIES = {
    "a function, and steps of Newton's law": (
        "def fly(q, p, eps):\n"
        "    p = p - 0.5 * eps * 4 * q ** 3\n"
        "    for _ in range(7):\n"
        "        q = q + eps * p\n"
        "        print(q.abs().max().item())\n"
        "        p = p - eps * 4 * q ** 3\n"
        "    return q\n"
        "q, eps = torch.ones(3), 0.01\n"
        "for _ in range(3):\n"
        "    print('begins', q.abs().max().item())\n"
        "    q = fly(q, torch.ones(3), eps)\n"
        "    eps = eps * 25\n"
        "print((q ** 2).sum().item())\n"
    ),
    "a method, with another name of the step": (
        "class Walk:\n"
        "    def __init__(self):\n"
        "        self.h = 0.01\n"
        "    def run(self, x):\n"
        "        v = torch.ones_like(x)\n"
        "        n = 0\n"
        "        while n < 6:\n"
        "            x = x + self.h * v\n"
        "            print(x.abs().max().item())\n"
        "            v = v - self.h * (x.pow(3) - x)\n"
        "            n += 1\n"
        "        return x\n"
        "walk, x = Walk(), torch.full((2,), 0.5)\n"
        "for _ in range(4):\n"
        "    print('begins', x.abs().max().item())\n"
        "    x = walk.run(x)\n"
        "    walk.h = walk.h * 20\n"
        "print(x.sum().item())\n"
    ),
}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_the_turns_are_those_of_one_trajectory(run_here: RunHere, name: str) -> None:
    ran = run_here(HEAD + TRAJECTORIES[name])
    first = next(line for line in ran.err.splitlines() if "fix: " in line)
    found = re.search(r"grew from (\S+) to (\S+) in (\d+) turns", first)
    assert found is not None, ran.err
    runs = [map(float, each.split()) for each in ran.out.partition("(")[0].split("begins")[1:]]
    finite = next(x for run in runs[::-1] if len(x := list(filter(math.isfinite, run))) > 1)
    held = finite[: finite.index(max(finite)) + 1]
    turns = int(found[3])
    assert 1 < turns < len(held), (held, first)
    assert f"{held[-1 - turns]:.2g}" == found[1], held


def test_the_turns_of_a_loop_in_a_loop_are_counted_on(run_here: RunHere) -> None:
    """No call begins anew there: the variable grows over both."""
    err = run_here(
        HEAD + "x = torch.ones(3)\nfor epoch in range(40):\n    shift = torch.zeros(3)\n"
        "    for _ in range(2):\n        x = x * 4 + shift\nprint(x.sum().item())\n"
    ).err
    found = re.search(r"in (\d+) turns", err)
    assert found is not None, err
    assert int(found[1]) > 20, err


SAMPLER = (
    "def energy(q):\n    return (q * q).sum().exp()\n"
    "q, eps = torch.full((3,), 0.4), 0.1\n"
    "def fly(q, p, eps):\n"
    "    q = q.clone().requires_grad_()\n"
    "    for _ in range(5):\n"
    "        (g,) = torch.autograd.grad(energy(q), q)\n"
    "        p = p - eps * g\n"
    "        q = q + eps * p\n"
    "    return q.detach(), p.detach()\n"
    "for turn in range(40):\n"
    "    p = torch.randn(3)\n"
    "    new, last = fly(q, p, eps)\n"
    "    ratio = torch.exp(energy(q) - energy(new) + p.square().sum() - last.square().sum())\n"
    "    if torch.rand(()) < ratio:\n        q = new\n"
    "    eps = eps * (1.5 if turn < 30 else 1) * (1 + 0 * ratio.item())\n"
    "print(eps, energy(q).item())\n"
)


def test_a_sampler_is_told_to_reject_first(run_here: RunHere) -> None:
    """Its steps adapt to what it rejects."""
    err = run_here(HEAD + SAMPLER).err
    first = err.partition("fix: ")[2].partition("\n")[0]
    assert first.startswith("reject a proposal that diverges: take 0 for `ratio` (script.py:17)"), (
        err
    )


# Statistics that a model keeps from batch to batch, and whether those are rounded.
STATISTICS = {
    "moments of the batches before": ("torch.zeros(())", True),
    "moments in float64": ("torch.zeros((), dtype=torch.float64)", False),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_float64_begins_at_rounded_statistics(run_here: RunHere, name: str) -> None:
    made, is_rounded = STATISTICS[name]
    text = (
        "class Norm(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.register_buffer('first', {made})\n"
        f"        self.register_buffer('second', {made})\n"
        "    def forward(self, x):\n        with torch.no_grad():\n"
        "            self.first.lerp_(x.mean().to(self.first.dtype), 1.0)\n"
        "            self.second.lerp_((x * x).mean().to(self.first.dtype), 1.0)\n"
        "        sd = torch.sqrt((self.second - self.first ** 2).float().clamp(min=0))\n"
        "        return (x - self.first.float()) / sd\n"
        "norm = Norm()\nnorm(torch.full((8,), 4.0) + torch.arange(8.0))\n"
        "for _ in range(3):\n    norm(5000 + 0.5 * torch.arange(8.0))\n"
    )
    err = run_here(HEAD + text).err
    numbers = next((line for line in err.splitlines() if line.startswith("  at [")), "")
    assert ("; in float64, from float32 buffers on, " in numbers) == is_rounded, err


def test_constants_in_buffers_are_no_statistics(run_here: RunHere) -> None:
    text = (
        "class Scale(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('one', torch.full((3,), 1.0))\n"
        "    def forward(self, x):\n        return x / (self.one + 1e-9 * x - 1)\n"
        "Scale()(torch.ones(3))\n"
    )
    err = run_here(HEAD + text).err
    assert "; in float64 1.0 / " in err, err
