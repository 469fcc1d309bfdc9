"""What ``fxguard run`` proposes of logarithms of 0 that an exponential makes 0 of again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

WEIGHTS = "w = torch.randn(4, 5)\nw[2] = 0\nw.requires_grad_()\n"
SCALED = (
    WEIGHTS + "largest = w.detach().abs().amax(1, keepdim=True)\n{}((w / s) * s).sum().backward()\n"
)
BOUND = "{}.clamp(min=1e-08): it reads 0, makes -inf of it, and {} makes 0 of that"

FIRST = {
    "a power of two": (
        SCALED.format("e = torch.ceil(torch.log2(largest / 7))\ns = 2.0 ** e\n"),
        "bound what log2 (script.py:9) reads, "
        + BOUND.format("(largest / 7)", "pow (script.py:10)"),
    ),
    "by exp2": (
        SCALED.format("s = torch.exp2(largest.log2().round())\n"),
        "bound what log2 (script.py:9) reads, " + BOUND.format("largest", "exp2 (script.py:9)"),
    ),
    "a share in decibels": (
        SCALED.format("db = 10 * torch.log10(largest)\ns = 10 ** (db / 10 - 1)\n"),
        "bound what log10 (script.py:9) reads, " + BOUND.format("largest", "pow (script.py:10)"),
    ),
    "a geometric mean": (
        SCALED.format("s = w.detach().abs().log().mean(1, keepdim=True).exp()\n"),
        "bound what log (script.py:9) reads, "
        + BOUND.format("w.detach().abs()", "exp (script.py:9)"),
    ),
}

OTHER = {
    "a scale that is 0 itself": SCALED.format("s = largest * 2.0 ** -3\n"),
    "an exponential of numbers that are too low": SCALED.format(
        "s = torch.exp2(largest * 0 - 300)\n"
    ),
    "a mask in what is normalised": (
        "x = torch.randn(3, 4, requires_grad=True)\nm = torch.zeros(3, 4)\nm[1] = 1\n"
        "e = (x + (1 - m).log()).exp()\n(e / e.sum(1, keepdim=True)).sum().backward()\n"
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_logarithm_is_bounded(run_here: RunHere, name: str) -> None:
    """And no note says that its -inf does no harm."""
    program, fix = FIRST[name]
    found = run_here(IMPORTS + program)
    assert found.status == 3
    assert found.fixes[0].startswith(f"fix: {fix}"), found.fixes
    assert "does no harm" not in found.err


@pytest.mark.parametrize("name", OTHER)
def test_other_zeros(run_here: RunHere, name: str) -> None:
    """Nothing there makes -inf of a 0 that could be bounded."""
    found = run_here(IMPORTS + OTHER[name])
    assert found.status == 3
    assert not any("bound what log" in fix for fix in found.fixes), found.fixes
