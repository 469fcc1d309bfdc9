"""A script in float16 that scales its loss by hand, without a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scale, dropped = 2.0**20, 0
for step in range(8):
    x, y = torch.randn(64, 16).half(), torch.randint(0, 4, (64,))
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    ({loss}).backward()
    grads = [p.grad for p in model.parameters()]
    if {skips} and not all(g.isfinite().all() for g in grads):
        scale, dropped = scale / 2, dropped + 1
        continue
    for g in grads:
        g /= scale
    optimizer.step()
    print(loss.item(), dropped)
"""


def test_a_step_that_the_script_skips_is_healthy(ends_as_ever: EndsAsEver) -> None:
    """As one that a GradScaler skips."""
    for loss in "loss * scale", "loss * scale / 2", "scale * loss":
        ends_as_ever(SCRIPT.format(loss=loss, skips=True))


def test_a_step_that_is_made_all_the_same_is_told(run_here: RunHere) -> None:
    """With the scale, and the operation whose backward overflows because of it."""
    found, _, err = run_here(SCRIPT.format(loss="loss * scale", skips=False))
    lines = err.splitlines()
    assert found == 3
    assert lines[0] == "SGD's step made weight 2.weight inf: loss scale"
    assert "because of the loss scale of 1.04858e+06: backward of linear in 2 made " in lines[2]
    assert lines[3] == (
        "  fix: skip the step while a gradient is not finite, and lower the loss scale (advice)"
    )


def test_another_number_is_no_scale(run_here: RunHere) -> None:
    """The weight of a loss is no power of two: what overflows is told at once."""
    found, _, err = run_here(SCRIPT.format(loss="loss * 1e6", skips=True))
    assert found == 3
    assert err.splitlines()[0].startswith("backward of "), err


def test_the_gradient_of_a_weight_has_its_numbers(run_here: RunHere) -> None:
    """A linear layer in float16, whose weight has another shape than what it returned."""
    _, _, err = run_here(SCRIPT.format(loss="loss * 1e6", skips=True))
    lines = err.splitlines()
    assert lines[0] == "backward of linear in 2 made inf: overflow"
    assert "linear of numbers from 0.0 to " in lines[1]
    assert "; grad of weight inf" in lines[1]
