"""Dynamic loss scaling: what overflows in the backward is its business, in the forward is ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxguard


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
