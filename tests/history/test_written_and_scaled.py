"""Faults that a training loop makes itself: weights written, rates turned, losses scaled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.types import History
from support.needs import needs

needs("pyarrow")

STEPS, AT = 160, 130


class Adapted(nn.Module):
    """A frozen layer, and one that is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.added, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head((self.base(x) + self.added(x)).tanh())
        return found


Change = Callable[[int, nn.Module, torch.optim.Optimizer], object]


def trained(
    folder: Path, change: Change, scale: Callable[[int], float] = lambda step: 1.0
) -> History:
    """The history of a training in which something is done before each step."""
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.05)
    with fxguard.watch(model, history=folder):
        for step in range(STEPS):
            change(step, model, optimizer)
            x = torch.randn(64, 8)
            loss = nn.functional.mse_loss(model(x), x[:, :1])
            optimizer.zero_grad()
            (loss * scale(step)).backward()
            for x in model.parameters():
                if x.grad is not None:
                    x.grad /= scale(step)
            optimizer.step()
    return fxguard.load_history(folder)


def test_a_frozen_weight_that_is_written(tmp_path: Path) -> None:
    """What is merged and taken out again leaves a rounding, and that is no write."""

    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = model.base.weight.data  # type: ignore[union-attr]
        if step % 20 == 0:
            weight += 0.3
            weight -= 0.3
        if step == AT:
            weight *= -3

    (event,) = trained(tmp_path, change).events
    assert (event.step, event.cause, event.what) == (AT, "weights", "base.weight")


def test_a_frozen_weight_that_is_written_when_it_is_unfrozen(tmp_path: Path) -> None:
    """A copy of an earlier time is loaded: the last comparison is that of the step after."""

    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == AT:
            model.base.requires_grad_(True)  # type: ignore[operator, union-attr]
            model.base.weight.data *= -3  # type: ignore[union-attr, operator]
            optimizer.add_param_group({"params": [*model.base.parameters()]})  # type: ignore[union-attr]

    first = trained(tmp_path, change).events[0]
    assert (first.step, first.cause, first.what) == (AT, "weights", "base.weight")


class WithCount(torch.optim.SGD):
    """Counts its steps in its state, beside what it holds of each weight."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]
        super().step()


def test_a_state_that_is_of_no_weight(tmp_path: Path) -> None:
    """There are as many states as weights: one of them has no gradient."""
    model = nn.Linear(8, 1)
    optimizer = WithCount(model.parameters(), lr=0.1, momentum=0.9)
    with fxguard.watch(model, history=tmp_path):
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.linear(model(torch.randn(4, 8)), torch.ones(1, 1)).sum().backward()
            model.bias.grad = None
            optimizer.step()
    history = fxguard.load_history(tmp_path)
    assert len(history.get("state momentum_buffer of WithCount's step").steps) == 4


def rebuilt(folder: Path, change: Callable[[nn.Module], object]) -> History:
    """The history of a training whose optimizer is built anew, after something was done."""
    torch.manual_seed(0)
    model = Adapted().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with fxguard.watch(model, history=folder):
        for step in range(STEPS):
            if step == AT:
                change(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            x = torch.randn(64, 8)
            loss = nn.functional.mse_loss(model(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fxguard.load_history(folder)


def test_a_weight_that_is_written_when_the_optimizer_is_built_anew(tmp_path: Path) -> None:
    def negated(model: nn.Module) -> None:
        model.head.weight.data *= -4  # type: ignore[union-attr, operator]

    (event,) = rebuilt(tmp_path / "written", negated).events
    assert (event.step, event.cause, event.what) == (AT, "weights", "head.weight")
    assert rebuilt(tmp_path / "same", lambda model: None).events == ()


def test_a_first_step_that_begins_twice(tmp_path: Path) -> None:
    """It has raised the first time, and torch calls hooks around the step of a base class, too."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxguard.watch(model, history=tmp_path):
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if not step:
                with pytest.raises(RuntimeError, match="not now"):
                    optimizer.step(refuses)
            optimizer.step()
    assert len(fxguard.load_history(tmp_path).get("step weight").steps) == 4


def refuses() -> float:
    raise RuntimeError("not now")


def test_a_weight_of_more_rows_in_place_of_another(tmp_path: Path) -> None:
    """What was there before stands first, and other rows are read than before."""

    def more(model: nn.Module) -> None:
        for name in ("base", "added"):
            layer = nn.Linear(8, 32)
            layer.weight.data[:16] = getattr(model, name).weight.data
            layer.weight.data[16:] *= 30
            setattr(model, name, layer)
        model.head = nn.Linear(32, 1)

    history = rebuilt(tmp_path, more)
    assert history.get("drift base.weight").high[-1] == 0
    drift = history.get("drift base.weight")
    assert drift.high[drift.steps.index(AT)] > 0.9
    assert history.events[0].step == AT


def test_weights_of_which_a_script_steps_copies(tmp_path: Path) -> None:
    """Steps are counted as the script counts them, and a copy of an earlier time is found."""
    torch.manual_seed(0)
    model = Adapted().requires_grad_(True)
    masters = [x.detach().clone() for x in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    with fxguard.watch(model, history=tmp_path):
        for step in range(STEPS):
            if step == AT:
                masters[0].mul_(-6)
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master)
            x = torch.randn(64, 8)
            nn.functional.mse_loss(model(x), x[:, :1]).backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad, weight.grad = weight.grad, None
            optimizer.step()
    history = fxguard.load_history(tmp_path)
    assert history.get("drift head.weight buffer").steps[-1] == STEPS - 1
    first = history.events[0]
    assert (first.step, first.cause, first.what) == (AT, "weights", "base.weight")


def test_a_weight_that_is_trained_later_is_none_of_them(tmp_path: Path) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == AT:
            model.base.requires_grad_(True)  # type: ignore[operator, union-attr]
            optimizer.add_param_group({"params": [*model.base.parameters()]})  # type: ignore[union-attr]

    history = trained(tmp_path, change)
    assert history.events == ()
    drift = history.get("drift base.weight buffer")
    assert max(drift.high) == 0
    assert drift.last_steps[-1] == AT  # what was written before it is trained


def test_a_learning_rate_that_becomes_negative(tmp_path: Path) -> None:
    """As a linear schedule does that nobody has clamped."""

    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 100)

    event = trained(tmp_path, change).events[0]
    assert (event.step, event.cause) == (101, "step")
    assert event.evidence[0].startswith("learning rate of SGD's step goes from 0 to -0.005")


def test_an_own_loss_scale_is_no_jump(tmp_path: Path) -> None:
    """It is doubled while all goes well, and the loss is what was scaled."""
    history = trained(tmp_path, lambda *given: None, lambda step: 2.0 ** (10 + step // 30))
    assert history.events == ()
    (name,) = (name for name in history.series if name.startswith("loss"))
    assert max(history.get(name).high) < 4
