"""Every rewrite of a rule: both sides can be read, and an exact one is the same function."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor

from fxguard.advice.rules import RULES
from fxguard.patch._operations import OF_RULES, Imports
from fxguard.patch._rendering import ATOM, Renderer
from fxguard.patch._rewriting import sides_of

TORCH = Imports({"torch": "torch"}, {})


class AnyCase:
    """A case with words that fit every rule."""

    name = log = "log"
    per_log = ""
    near_zero = "1e-12"
    safe = "1"
    bounded_exponent = "exp(a) -> exp(a.clamp(max=66))"
    weighted_log = "p * log(q) -> xlogy(p, q)"
    scaled_before = "(a @ b) * s -> (a * s) @ b"
    without_infinity = 'a * b.masked_fill(b == float("-inf"), 0)'


REWRITES = [
    (rule.kind, text.format(c=AnyCase)) for rule in RULES for text in rule.rewrites if rule.rewrites
]


@pytest.mark.parametrize("rule", sorted({rule for _, rule in REWRITES}))
def test_both_sides_can_be_read(rule: str) -> None:
    """The old one is an operation, and the new one has no letter that the old one lacks."""
    old, new = sides_of(rule)
    assert OF_RULES.operation(old) is not None
    assert letters_of(new) <= letters_of(old)


@pytest.mark.parametrize("rule", sorted({rule for kind, rule in REWRITES if kind == "exact"}))
def test_an_exact_rewrite_is_the_same_function(rule: str) -> None:
    """In value and gradient, in float64, where the old expression has a number."""
    if any(masked in rule for masked in ("(1 - b) * float", "b * float")):
        return  # it has none at all
    old, new = sides_of(rule)
    torch.manual_seed(0)
    operands: dict[str, Any] = {
        name: torch.rand(4, 4, dtype=torch.float64).sub(1.1 if name == "x" else 0).requires_grad_()
        for name in sorted(letters_of(old) - set("cdks"))
    }
    operands |= {"d": -1, "k": True, "s": 0.5, "c": torch.rand(4, 4) > 0.5}
    if "diag" in rule:
        operands["k"] = False
    made = [evaluated(side, operands) for side in (old, new)]
    assert torch.allclose(*made, rtol=1e-9, atol=1e-12)
    leaves = [x for x in operands.values() if isinstance(x, Tensor) and x.requires_grad]
    first, second = (torch.autograd.grad(x.sum(), leaves, allow_unused=True) for x in made)
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-10)


def letters_of(rule: ast.expr) -> set[str]:
    return {x.id for x in ast.walk(rule) if isinstance(x, ast.Name) and len(x.id) == 1}


def evaluated(rule: ast.expr, operands: dict[str, Any]) -> Tensor:
    text = Renderer(TORCH, lambda letter: (letter, ATOM)).text(rule)
    value: Tensor = eval(text, {"torch": torch}, operands)
    return value
