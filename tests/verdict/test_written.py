"""What a line computes by itself is not said to come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.source.written import operand_in


@pytest.mark.parametrize(
    ("code", "what", "expression"),
    [
        ("logits = logits - eye * self.big  # its own", "input[1] of sub", "eye * self.big"),
        ("z = torch.log(time) - scale", "input[0] of sub", "torch.log(time)"),
        ("return -(torch.stack(logps) * adv).sum()", "input[1] of mul", ""),
        ("loss = -(targets * out).sum()", "input[0] of mul", ""),
        ("a = x - y.exp() - z.log()", "input[1] of sub", ""),
        ("a = 1 - x.exp()", "input[0] of sub", ""),
        ("loss = torch.sub(x, y.exp())", "input[1] of sub", ""),
        ("x - y.exp(),", "input[1] of sub", "y.exp()"),
        ("if x - y.exp() > 0:", "input[1] of sub", ""),
        ("a = x - y.exp()", "argument `x` of Model.forward", ""),
    ],
)
def test_an_operand_is_found_where_it_is_certain(code: str, what: str, expression: str) -> None:
    """Only one operation of that kind, on two tensors, and an expression that computes."""
    assert operand_in(code, what) == expression


Loss = Callable[[Tensor, Tensor], Tensor]


def here(out: Tensor, time: Tensor) -> Tensor:
    return out - torch.log(time)


def before(out: Tensor, time: Tensor) -> Tensor:
    logs = torch.log(time)
    return out - logs


def fix_of(loss: Loss) -> str:
    """What is said of a loss that reads the logarithm of a time of 0."""
    torch.manual_seed(0)
    model, found = nn.Linear(3, 3), list[fxguard.types.Report]()
    with fxguard.watch(model, on_detect=found.append):
        loss(model(torch.ones(2, 3)), torch.tensor([0.0, 1.0, 2.0])).mean().backward()
    return str(found[0].fix)


def test_the_fix_names_the_expression() -> None:
    """It is on the line that the report shows, and nothing is said to be out of sight."""
    wanted = "look at `torch.log(time)` on this line, which is input[1] of sub: log(0) is -inf"
    assert fix_of(here) == f"{wanted} (advice)"


def test_what_another_line_computed_comes_from_elsewhere() -> None:
    """The twin: this line has only a name for it."""
    text = fix_of(before)
    assert text.startswith("look at torch.log(time) (test_written.py:")
    assert "log(0) is -inf; fxguard has not seen it run" in text
