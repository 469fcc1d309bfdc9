"""Gradients that float16 makes 0: which, how large they would be, and the loss scale for them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.rerun.gradients import gradients_of
from fxguard.steps import lost_gradients


class Net(nn.Module):
    """Two layers; what comes out of it is multiplied by `scale`, and by it again."""

    def __init__(self, scale: float = 1e-4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() * self.scale) * self.scale  # type: ignore[no-any-return]


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 16)


def in_autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return net(x).float().mean()  # type: ignore[no-any-return]


def in_half(net: nn.Module, x: Tensor) -> Tensor:
    return net.half()(x.half()).float().mean()  # type: ignore[no-any-return]


def compiled(net: nn.Module, x: Tensor) -> Tensor:
    return in_half(torch.compile(net, backend="aot_eager"), x)


Step = Callable[[nn.Module, Tensor], Tensor]
LOST = re.compile(
    r"all gradients of (\S+)( and of \d+ more)? are 0 in float16: "
    r"the largest would be (\S+); a loss scale of 2\*\*(\d+) lifts them"
)


@pytest.mark.parametrize("step", [in_half, in_autocast, compiled])
def test_what_is_said_is_true(step: Step) -> None:
    """Of the weights named, the largest number in float32, and the scale."""
    model = fxguard.instrument(Net())
    x = inputs()
    with pytest.warns(RuntimeWarning, match="are 0 in float16") as said:
        step(model, x).backward()
    match = LOST.fullmatch(str(said[0].message))
    assert match is not None, str(said[0].message)
    zero = {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}
    assert match[1] in zero
    assert match[2] == f" and of {len(zero) - 1} more"
    exact = Net()
    exact(x).mean().backward()
    would_be = [p.grad for name, p in exact.named_parameters() if name in zero]
    largest = max(float(gradient.abs().max()) for gradient in would_be if gradient is not None)
    assert float(match[3]) == pytest.approx(largest, rel=0.5)
    model.zero_grad()
    (step(model, x) * 2.0 ** int(match[4])).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    (note,) = fxguard.guard_of(model).notes
    assert (note.message, note.problem, note.phase) == (match[0], "underflow", "backward")
    assert note.frame.kind in ("linear", "mul")


def test_it_is_said_once() -> None:
    """Of a training that goes on so."""
    with warnings.catch_warnings(record=True) as said, fxguard.watch(Net().half()) as guard:
        warnings.simplefilter("always")
        for _ in range(5):
            in_half(guard.model, inputs()).backward()
    assert len([each for each in said if "are 0 in float16" in str(each.message)]) == 1


def test_a_loss_outside_the_model_in_half_precision() -> None:
    """No scale that fits float16 lifts all of them: none is named."""
    with (
        fxguard.watch(Net().half()) as guard,
        pytest.warns(RuntimeWarning, match="0 in float16.*; bfloat16 or float32 holds them"),
    ):
        (guard.model(inputs().half()) * 2).mean().mul(1e-4).backward()


def test_a_gradient_that_the_loss_has_lost() -> None:
    """Nothing came into the model: what it returned is named."""
    with (
        fxguard.watch(Net(1.0).half()) as guard,
        pytest.warns(RuntimeWarning, match="of what the model returned are 0 in float16"),
    ):
        (guard.model(inputs().half()) * 1e-4).mean().float().mul(1e-3).backward()


class NoGradient(nn.Module):
    """The gradients of the first weight are 0 by right: the second is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 4)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [in_half, in_autocast])
@pytest.mark.parametrize("net", [NoGradient, lambda: Net(1.0)], ids=["zero", "ordinary"])
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_what_is_zero_by_right(net: Callable[[], nn.Module], step: Step) -> None:
    model = fxguard.instrument(net())
    for _ in range(4):
        step(model, inputs()).backward()
    assert not fxguard.guard_of(model).notes


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_in_bfloat16_and_with_a_scaler() -> None:
    """One holds such numbers, and the other grows until they are held."""
    fxguard.instrument(Net().bfloat16())(inputs().bfloat16()).mean().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model = fxguard.instrument(Net())
    scaler.scale(in_autocast(model, inputs())).backward()
    assert not fxguard.guard_of(model).notes


def test_what_is_zero_by_right_is_looked_at_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second run, in the first step and in the fourth."""
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return gradients_of(*args)

    monkeypatch.setattr(lost_gradients, "gradients_of", counted)
    model = fxguard.instrument(NoGradient())
    for _ in range(6):
        in_half(model, inputs()).backward()
    assert count == 2
