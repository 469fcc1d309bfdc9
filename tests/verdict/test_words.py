"""The printed cause: what happened to the numbers, and never a divisor where nothing is divided."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.advice.words import AT_POLES, OUTSIDE, words_for
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import DEFAULT_EPS, LAWS, SINGULAR
from fxguard.report.text import cause_text

INF = math.inf


class Does(nn.Module):
    """A model whose forward is one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def said_of(function: Callable[[Tensor], Tensor], *numbers: float) -> str:
    """The cause that a report prints of a function of these numbers."""
    model = fxguard.instrument(Does(function))
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.tensor(numbers))
    origin = caught.value.report.origins[0]
    assert caught.value.report.verdict[0] == origin.message + cause_text(origin)
    return cause_text(origin).removeprefix(": ")


@pytest.mark.parametrize(
    ("function", "numbers", "words"),
    [
        (torch.log, (1.0, 0.0), "log of zero"),
        (torch.log2, (1.0, 0.0), "log of zero"),
        (torch.log10, (1.0, 0.0), "log of zero"),
        (torch.log1p, (1.0, -1.0), "log of zero"),
        (torch.logit, (0.5, 0.0), "log of zero"),
        (torch.logit, (0.5, 1.0), "log of zero"),
        (lambda x: torch.xlogy(2.0, x), (1.0, 0.0), "log of zero"),
        (torch.log, (1.0, -3.0), "log of a negative number"),
        (torch.log1p, (1.0, -3.0), "log of a negative number"),
        (lambda x: 3 / x, (1.0, 0.0), "division by zero"),
        (lambda x: x / (x - x), (1.0, 3.0), "division by zero"),
        (torch.reciprocal, (1.0, 0.0), "division by zero"),
        (lambda x: x / x, (1.0, 0.0), "0 / 0"),
        (torch.rsqrt, (1.0, 0.0), "division by the root of zero"),
        (torch.rsqrt, (1.0, -1.0), "square root of a negative number"),
        (torch.sqrt, (1.0, -1.0), "square root of a negative number"),
        (lambda x: x**-0.5, (1.0, 0.0), "zero to a negative power"),
        (lambda x: x**0.3, (1.0, -1.0), "a fractional power of a negative number"),
        (torch.acos, (1.0, 1.5), "acos outside [-1, 1]"),
        (torch.atanh, (0.5, -1.0), "atanh of -1"),
        (torch.digamma, (0.5, 0.0), "digamma of 0, where it is infinite"),
        (torch.acosh, (1.5, 0.5), "acosh below 1"),
        (lambda x: torch.layer_norm(x, (2,), eps=0.0), (3.0, 3.0),
         "division by a deviation of zero"),
        (lambda x: nn.functional.normalize(x, dim=0, eps=0.0), (0.0, 0.0),
         "division by a norm of zero"),
        (lambda x: torch.logdet(x.outer(x)), (1.0, 0.0), "a singular matrix"),
        (lambda x: x.masked_fill(x > 2, -INF) * x.clamp(max=0), (3.0, 1.0),
         "0 * inf of a mask"),
        (lambda x: x.masked_fill(x > 2, -INF) - x.masked_fill(x > 2, -INF), (3.0, 1.0),
         "inf - inf of a mask"),
        (lambda x: x.masked_fill(x > 2, -INF) @ x, (3.0, 1.0), "it read -inf of a mask"),
        (lambda x: x.masked_fill(x > 2, -INF).cos(), (3.0, 1.0), "cos of -inf of a mask"),
        (lambda x: x * 3e38, (3.0, 1.0), "overflow"),
    ],
)  # fmt: skip
def test_the_cause_is_told_in_the_words_of_the_operation(
    function: Callable[[Tensor], Tensor], numbers: tuple[float, ...], words: str
) -> None:
    """Of zero, of a negative number, 0 * inf: what the numbers are, not what the table calls it."""
    assert said_of(function, *numbers) == words


def test_every_operation_with_a_pole_or_a_domain_has_words() -> None:
    """The table of words is as long as the table of laws; and it names no other operation."""
    poles = {name for name, law in LAWS.items() if law.pole is not type(law)("{}").pole}
    domains = {name for name, law in LAWS.items() if law.outside is not type(law)("{}").outside}
    assert poles | SINGULAR | set(DEFAULT_EPS) == set(AT_POLES)
    assert domains == set(OUTSIDE)
    for name, words in AT_POLES.items():
        divides = "divi" in words or "zero to" in words or "log of" in words or name in words
        assert divides or name in SINGULAR, (name, words)


def test_an_operation_inside_another_gives_the_words() -> None:
    """What failed inside is what is told, where the whole has a finite result in float64."""
    zero = Operand(0.0, 0.0, dtype="float16")
    inner = Evidence("log", "float16", (0,), -INF, (zero,), -INF)
    whole = Evidence("kl_div", "float16", (0,), INF, (zero,), same=1.0, inner=inner)
    assert words_for("zero divisor", whole) == "log of zero"
    assert words_for("zero divisor", dataclasses.replace(whole, same=INF)) == ""
    assert words_for("overflow", inner) == words_for("zero divisor", None) == ""


def test_an_optimizer_that_divides_by_zero_says_so() -> None:
    """Without an eps, Adam divides 0 by 0."""
    layer = nn.Linear(1, 1)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), eps=0.0)
    with fxguard.watch(layer):
        layer(torch.zeros(1, 1)).sum().backward()
        with pytest.raises(fxguard.NonFiniteError, match="division by zero"):
            optimizer.step()
