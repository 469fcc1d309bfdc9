"""Functions whose logarithm or quotient is an ordinary number, where they themselves are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import math, torch\nfrom torch.distributions import Normal\ntorch.manual_seed(0)\n"
FIRST = "fix: take "

# The program, and what the first fix is.
FIRST_FIXES = {
    "in the backward alone, as logsumexp hides it": (
        "log_kappa = torch.full((3, 2), 4.6, requires_grad=True)\nx = torch.randn(50, 2)\n"
        "def density(x, mu, kappa):\n"
        "    norm = math.log(2 * math.pi) + torch.log(torch.special.i0(kappa))\n"
        "    return kappa * torch.cos(x - mu) - norm\n"
        "kappa = torch.cat([log_kappa[:2], log_kappa[2:] - 3]).exp()\n"
        "terms = density(x[:, None], torch.zeros(3, 2), kappa).sum(-1)\n"
        "(-torch.logsumexp(terms, 1).mean()).backward()\n",
        "log(special.i0e(kappa)) + kappa.abs() instead of log(i0(kappa)) (exact)",
    ),
    "in a method of a class": (
        "class Ring:\n    def __init__(self):\n"
        "        self.conc = torch.tensor([2.0, 120.0], requires_grad=True)\n"
        "    def log_z(self):\n        return self.conc.i0().log()\n"
        "Ring().log_z().sum().backward()\n",
        "log(special.i0e(self.conc)) + self.conc.abs() instead of log(i0(self.conc)) (exact)",
    ),
    "through a helper": (
        "def bessel(v):\n    return torch.special.i1(v)\n"
        "k = torch.tensor([3.0, 99.0])\nprint(bessel(k).log())\n",
        "log(special.i1e(v)) + v.abs() instead of log(i1(v)) (exact)",
    ),
    "a mean length of a vector": (
        "k = torch.tensor([3.0, 99.0])\nnumber = torch.special.i1(k)\n"
        "length = number / torch.i0(k)\nprint(length)\n",
        "special.i1e(k) / special.i0e(k) instead of i1(k) / i0(k) (exact)",
    ),
    "with a factor": (
        "k = torch.tensor([3.0, 99.0])\nprint(torch.log(2 * math.pi * torch.i0(k)))\n",
        "log(special.i0e(k)) + k.abs() for the logarithm of i0(k), and add the logarithms of its",
    ),
    "a density without a logarithm": (
        "k = torch.tensor([3.0, 99.0], requires_grad=True)\nnorm = 2 * math.pi * torch.i0(k)\n"
        "p = torch.exp(k * 0.3) / norm\np.sum().backward()\n",
        "torch.special.i0e(k), which is i0(k) * exp(-k.abs()), and move exp(k.abs()) into the",
    ),
    "a censored normal": (
        "mu = torch.tensor([0.0, -30.0], requires_grad=True)\n"
        "(-Normal(0.0, 1.0).cdf(mu).log()).sum().backward()\n",
        "special.log_ndtr(x) instead of log(0.5 * (1 + erf(x / sqrt(2)))) (exact)",
    ),
    "above a threshold": (
        "z = torch.tensor([0.0, 30.0])\nphi = 0.5 * (1 - torch.erf(z / math.sqrt(2)))\n"
        "print(torch.log(phi).sum())\n",
        "special.log_ndtr(-x) instead of log(0.5 * (1 - erf(x / sqrt(2)))) (exact)",
    ),
    "a tail": (
        "snr = torch.tensor([0.0, 30.0])\nprint(torch.special.erfc(snr).log10())\n",
        "(special.log_ndtr(-sqrt(2) * snr) + log(2)) / log(10) instead of log10(erfc(snr)) (exact)",
    ),
}

# The program, and what has no place in what is said.
LEFT_ALONE = {
    "a quotient at two operands": (
        "a, b = torch.tensor([99.0]), torch.tensor([2.0])\nprint(torch.i0(a) / torch.i0(b))\n",
        "instead of",
    ),
    "erf by hand with another scale": (
        "z = torch.tensor([0.0, -30.0])\nprint(torch.log(0.5 * (1 + torch.erf(z))))\n",
        "log_ndtr",
    ),
    "an exponential between others": (
        "x = torch.tensor([1.0, 200.0])\nprint(torch.log(torch.exp(x) + 1))\n",
        "take x instead of",
    ),
}


@pytest.mark.parametrize("name", FIRST_FIXES)
def test_the_first_fix(run_here: RunHere, name: str) -> None:
    text, told = FIRST_FIXES[name]
    ran = run_here(HEAD + text)
    fixes = [line.strip() for line in ran.err.splitlines() if line.strip().startswith("fix: ")]
    assert fixes
    assert fixes[0].startswith(FIRST + told)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_another_function(run_here: RunHere, name: str) -> None:
    text, not_told = LEFT_ALONE[name]
    ran = run_here(HEAD + text)
    assert "made" in ran.err
    assert not_told not in ran.err


def test_a_kernel_that_overflows_on_the_way(run_here: RunHere) -> None:
    """i0(91.45) fits float32, and the exponential by which it is computed does not."""
    ran = run_here(HEAD + FIRST_FIXES["in the backward alone, as logsumexp hides it"][0])
    assert "overflow" in ran.err
    assert "rounding" not in ran.err
    ran = run_here(HEAD + "print(torch.i0(torch.tensor([91.45])))\n")
    assert "i0 made inf (script.py:4): overflow" in ran.err
