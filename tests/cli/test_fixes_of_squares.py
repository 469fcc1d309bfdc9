"""Squares that became 0 of small numbers: in quotients that do not change with their scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
FREE = "divide by the largest first, {}: the quotient stays the same, and {} (script.py:{}) made 0 "
SOFTMAX = "; or take softmax of what exp (script.py:{}) reads, in place of it"
GUARD = "; a safe divisor makes a wrong number of it"
MADE = "{} (script.py:{}) made 0 of numbers {}: "

FREE_OF_SCALE = {
    "an effective sample size": (
        "lw = torch.tensor([-60.0, -61, -70])\nw = lw.exp()\n"
        "print(w.sum() ** 2 / (w ** 2).sum())\n",
        FREE.format("w / w.max()", "pow", 6) + "of numbers up to 8.8e-27 in float32",
        SOFTMAX.format(5) + GUARD,
    ),
    "one of weights that have a gradient": (
        "theta = torch.zeros(3, requires_grad=True)\nw = (theta - 60).exp()\n"
        "def ess(weights):\n    return weights.sum().square() / weights.square().sum()\n"
        "print(ess(w.detach()))\n",
        FREE.format("weights / weights.max()", "square", 7) + "of numbers up to 8.8e-27",
        SOFTMAX.format(5) + GUARD,
    ),
    "one of weights that another part made": (
        "w = torch.tensor([2e-26, 5e-27], dtype=torch.float64).float()\n"
        "print(w.sum() ** 2 / torch.dot(w, w))\n",
        FREE.format("w / w.abs().max()", "dot", 5) + "of numbers up to 2e-26 in float32",
        GUARD,
    ),
    "squares on a line of their own": (
        "w = torch.rand(6) * 1e-25\ntotal = w.sum()\nsq = w ** 2\nsquares = sq.sum()\n"
        "print(total ** 2 / squares)\n",
        FREE.format("w / w.abs().max()", "pow", 6),
        GUARD,
    ),
    "a kurtosis": (
        "x = torch.randn(50) * 1e-14\nc = x - x.mean()\n"
        "print(c.pow(4).mean() / c.pow(2).mean() ** 2)\n",
        FREE.format("c / c.abs().max()", "pow", 6),
        GUARD,
    ),
    "rows, one of which is small": (
        "e = torch.rand(3, 8) + 0.5\ne[1] *= 1e-24\nprint(e.sum(1) ** 2 / e.pow(2).sum(1))\n",
        FREE.format("e / e.abs().amax(dim, keepdim=True)", "pow", 6) + "of numbers down to 5.2e-25",
        GUARD,
    ),
    "a cosine": (
        "a, b = torch.randn(5), torch.randn(5) * 1e-25\n"
        "print((a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt()))\n",
        FREE.format("x / x.abs().max() for the x that the quotient is made of", "mul", 5),
        GUARD,
    ),
}

SQUARES = {
    "a logarithm of an energy": (
        "x = torch.randn(50) * 1e-25\nprint(torch.log((x ** 2).sum()))\n",
        MADE.format("pow", 5, "up to 3.4e-25") + "take 2 * log(x.abs()) in place of the log of",
    ),
    "distances that are divided by": (
        "r = torch.rand(5) * 1e-25 + 1e-26\ny = torch.randn(5)\nprint(y / r ** 2)\n",
        MADE.format("pow", 6, "up to 8.7e-26") + "scale them before it, or compute it in float64, "
        "as float32 holds those of numbers down to 4e-23",
    ),
    "a quotient of another degree": (
        "w = torch.rand(4) * 1e-25\nprint(w.sum() / (w ** 2).sum())\n",
        MADE.format("pow", 5, "up to 7.7e-26") + "scale them before it",
    ),
    "exponentials that are all 0": (
        "e = torch.rand(6) * 10 + 200\nw = torch.exp(-e)\nprint(w.sum() ** 2 / (w ** 2).sum())\n",
        "take softmax of what exp (script.py:5) reads, in place of it: the quotient stays the same",
    ),
    "weights that are 0": (
        "w = torch.zeros(4)\nprint(w.sum() ** 2 / (w ** 2).sum())\n",
        "choose the divisor d = (w ** 2).sum() by where",
    ),
    "weights that a relu made 0": (
        "w = torch.relu(-torch.rand(4))\nprint(w.sum() ** 2 / (w ** 2).sum())\n",
        "choose the divisor d = (w ** 2).sum() by where",
    ),
    "rows, of which one is 0": (
        "x = torch.rand(3, 4)\nx[1] = 0\nprint(x.sum(1) ** 2 / x.pow(2).sum(1))\n",
        "choose the divisor d = x.pow(2).sum(1) by where",
    ),
    "a variance": (
        "x = torch.randn(50) * 1e-25\nprint(torch.rsqrt(x.pow(2).mean()) * x)\n",
        "add an eps to the variance",
    ),
}


@pytest.mark.parametrize("name", FREE_OF_SCALE)
def test_what_is_free_of_scale_is_scaled(run_here: RunHere, name: str) -> None:
    """By the largest number, of each row where there are rows; and no guard makes a 0 of it."""
    text, begin, end = FREE_OF_SCALE[name]
    err = run_here(HEAD + text).err
    fix = err.partition("fix: ")[2].splitlines()[0]
    assert fix.startswith(begin), err
    assert fix.endswith(f"{end} (advice)"), err
    assert "  or: " not in err


@pytest.mark.parametrize("name", SQUARES)
def test_other_squares(run_here: RunHere, name: str) -> None:
    """Are scaled for another result, or are 0 of numbers that are."""
    text, fix = SQUARES[name]
    err = run_here(HEAD + text).err
    assert err.partition("fix: ")[2].startswith(fix), err


REPAIRS = {
    "an effective sample size": "w = w / w.max()\n",
    "squares on a line of their own": "w = w / w.abs().max()\n",
    "rows, one of which is small": "e = e / e.abs().amax(1, keepdim=True)\n",
    "a kurtosis": "c = c / c.abs().max()\n",
}


@pytest.mark.parametrize("name", REPAIRS)
def test_scaling_repairs_it(run_here: RunHere, name: str) -> None:
    """As it is advised, in a line in front of the quotient's."""
    *lines, last = FREE_OF_SCALE[name][0].splitlines(keepends=True)
    at = 1 if name == "squares on a line of their own" else len(lines)
    text = "".join([*lines[:at], REPAIRS[name], *lines[at:], last])
    status, _, err = run_here(HEAD + text)
    assert status == 0, err
