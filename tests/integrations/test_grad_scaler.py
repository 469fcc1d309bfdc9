"""Dynamic loss scaling: what overflows in the backward is its business, in the forward is ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.answers import expect_no_contradiction


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_gradients_that_overflow_are_no_detection(backend: str) -> None:
    """The scaler skips its steps until the scale fits; then a forward that overflows is found."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = fxguard.instrument(GatedFeedForward())
    run = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    x = torch.randn(8, 16)
    skipped = 0
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run(x).float().square().mean()
        scaler.scale(loss).backward()
        skipped += any(not p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 0 < skipped < 40
    assert scaler.get_scale() < 2.0**30
    assert fxguard.guard_of(model).last_report is None
    assert fxguard.guard_of(model).batch_number == 40
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(fxguard.NonFiniteError, match="batch 40: mul made inf"),
    ):
        run(x * 1000)


def scaled(scale: float, loss: Callable[[Tensor], Tensor]) -> list[fxguard.Report]:
    """The reports on one backward of a loss that a scaler has scaled."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    found: list[fxguard.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(2, 8)).float()
        scaler.scale(loss(out)).backward()
    return found


FACTORS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "of each element": (1e5, lambda out: (out * 1e5).sum()),
    "of the sum": (1e6, lambda out: out.sum() * 1e6),
    "a divisor": (1e6, lambda out: (out / 1e-6).sum()),
}


@pytest.mark.parametrize(
    ("name", "scale"),
    [("of each element", 4.0), ("of the sum", 1.0), ("of the sum", 2.0**16), ("a divisor", 8.0)],
)
def test_a_factor_of_the_loss_is_no_loss_scale(name: str, scale: float) -> None:
    """The scaler's scale is known: what is left is a weight of the loss, and told as one."""
    factor, loss = FACTORS[name]
    [report] = scaled(scale, loss)
    [origin] = report.origins
    assert origin.cause == "overflow"
    assert origin.needed == pytest.approx(factor)  # the scale is divided out of all numbers
    fix = str(origin.fixes[0])
    assert fix == f"a factor of 2**15 at most in the loss: it is {factor:g} (advice)"
    assert f"without the loss's factor of {factor:g} it is at most 1: that factor" in report.why
    denied = f"without the loss scale of {scale:g} it is inf too: not the loss scale"
    assert (denied in report.why) is (scale != 1)
    expect_no_contradiction(report)
    assert scaled(scale, lambda out: loss(out) * 2.0**14 / factor) == []


def test_a_tensor_that_scales_the_loss_is_called_neither() -> None:
    """Only constants are read from a graph; the scale is known, and not to blame."""
    weight = torch.tensor(1e6)
    [report] = scaled(8.0, lambda out: (out * weight).sum())
    assert report.origins[0].cause == "overflow"
    assert "factor" not in str(report.fix)
    assert report.why[-1] == "without the loss scale of 8 it is inf too: not the loss scale"
