"""Autocast casts operands in silence; where it made an infinity the verdict names the cast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxguard


class Regional(nn.Module):
    """Switches autocast on for one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.linear(x)


def large(number: float) -> Tensor:
    x = torch.full((2, 4), 0.5)
    x[0, 0] = number
    return x


def verdict_of(model: nn.Module, x: Tensor, *, ambient: bool = False) -> list[str]:
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=reports.append)
    with torch.autocast("cpu", torch.float16, enabled=ambient):
        model(x)
    return reports[0].verdict if reports else []


def casts(verdict: list[str]) -> list[str]:
    return [line.strip() for line in verdict if "autocast casts" in line]


SAYS = "autocast casts input[0] up to 1.00e+05 to float16, which holds 65504"


@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_an_input_that_the_cast_makes_infinite_is_named(where: str, stance: str) -> None:
    """100000 is no number of float16: torch's own cast says so. In a graph, and between graphs."""
    x = large(1e5)
    assert x.half().isinf().any()
    model = nn.Sequential(nn.Linear(4, 4)) if where == "around" else Regional()
    with torch.compiler.set_stance(stance):
        verdict = verdict_of(model, x, ambient=where == "around")
    assert casts(verdict) == [SAYS]
    assert "linear" in verdict[0]


def test_a_weight_that_the_cast_makes_infinite_is_named() -> None:
    """By its name."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = 3e5
    said = casts(verdict_of(model, large(1.0), ambient=True))
    assert said == ["autocast casts weight up to 3.00e+05 to float16, which holds 65504"]


def test_what_the_cast_holds_is_not_named() -> None:
    """The clean twins: a product that overflows by itself, a number in range, no autocast."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(100.0)
    verdict = verdict_of(model, large(6e4), ambient=True)
    assert "made inf" in verdict[0]
    assert not casts(verdict)
    assert not verdict_of(nn.Linear(4, 4), large(6e4), ambient=True)
    assert not verdict_of(nn.Linear(4, 4), large(1e5))


def test_an_explicit_cast_is_the_users() -> None:
    """`x.half()` overflows by its own name."""

    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.half() * 1

    verdict = verdict_of(Casts(), large(1e5), ambient=True)
    assert verdict[0].startswith("half made inf")
    assert not casts(verdict)
