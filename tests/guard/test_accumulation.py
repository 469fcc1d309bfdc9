"""Steps after several backwards, of which one was bad: what is said of the others is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard


def good(out: Tensor) -> Tensor:
    return out.sum()


def bad(out: Tensor) -> Tensor:
    """Its gradient is NaN: the derivative of the root at 0, times 0."""
    return (out * 0).square().sum().sqrt()


Loss = Callable[[Tensor], Tensor]
Change = Callable[[nn.Module], Any]


def told(
    losses: Sequence[Loss], between: Change = lambda model: None, last: Change = lambda model: None
) -> list[fxguard.types.Report]:
    """The reports on one step after these backwards.

    Args:
        losses: one for each backward.
        between: called after the first backward.
        last: called after the last one.
    """
    torch.manual_seed(0)
    model, found = nn.Linear(3, 2), list[fxguard.types.Report]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model, on_detect=found.append):
        for index, loss in enumerate(losses):
            loss(model(torch.ones(2, 3))).backward()
            if index == 0:
                between(model)
        last(model)
        optimizer.step()
    # An independent count: gradients are NaN if, and only if, one of the backwards was bad.
    return found


def spoil(model: nn.Module) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.mul_(math.nan)


@pytest.mark.parametrize(
    "losses", [[bad], [bad, good], [good, bad], [good, bad, good], [bad, good, good]]
)
def test_a_step_with_a_reported_gradient_is_not_reported(losses: list[Loss]) -> None:
    """The NaN stays in the sum, whatever the later backwards bring: it follows."""
    assert [report.message.partition(" made")[0] for report in told(losses)] == [
        f"batch {losses.index(bad)}: backward of sqrt"
    ]


@pytest.mark.parametrize("losses", [[good], [good, good, good]])
def test_good_backwards_are_called_good(losses: list[Loss]) -> None:
    """The twin: the script spoils the gradient, and the backwards brought finite ones."""
    [report] = told(losses, last=spoil)
    n = len(losses)
    said = f"each of {n} backwards brought finite" if n > 1 else "it was finite when its backward"
    assert said in report.origins[0].operands


def test_a_gradient_that_was_set_to_zero_since_counts_no_more() -> None:
    """The script skips the bad backward, and spoils the gradient of the next one."""
    first, second = told([bad, good], between=lambda model: model.zero_grad(), last=spoil)
    assert first.phase == "backward"
    assert second.phase == "optimizer"
    assert "it was finite when its backward ended" in second.origins[0].operands


def test_a_gradient_that_was_set_to_zero_harms_no_step() -> None:
    """The script skips the bad backward, and goes on."""
    assert [r.phase for r in told([bad, good], lambda model: model.zero_grad())] == ["backward"]


def test_the_report_that_later_batches_name_is_there() -> None:
    """Weights that the step has spoilt are bad in the next batch, because of the backward."""
    torch.manual_seed(0)
    model, found = nn.Linear(3, 2), list[fxguard.types.Report]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model, on_detect=found.append):
        for loss in (bad, good):
            loss(model(torch.ones(2, 3))).backward()
        optimizer.step()
        model(torch.ones(2, 3))
    first, second = found
    assert f"the report of batch {first.batch_number} names" in str(second.fix)
