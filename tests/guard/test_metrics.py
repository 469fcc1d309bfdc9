"""Modules with buffers and no parameters: what they return is a fault if something comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

TARGETS = torch.tensor([0, 1, 1, 0])  # class 2 does not occur
NONE = torch.full_like(TARGETS, -100)  # all are ignored


class PerClass(nn.Module):
    """Hits per class, over all batches: 0/0 for a class that did not occur."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hits", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        self.hits += torch.bincount(targets[out.argmax(-1) == targets], minlength=3)
        self.total += torch.bincount(targets, minlength=3)
        return self.hits / self.total


class Range(nn.Module):
    """A running minimum and maximum, which begin with inf."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        self.low.copy_(torch.minimum(self.low, x.detach().min()))
        self.high.copy_(torch.maximum(self.high, x.detach().max()))
        return x


class Average(nn.Module):
    """A running average, which begins with NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        self.value = torch.where(self.value.isnan(), mean, 0.9 * self.value + 0.1 * mean)
        return self.value


class Weighted(nn.Module):
    """A criterion with the weights of classes in a buffer: NaN if all targets are ignored."""

    def __init__(self, *weight: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(weight or (1.0, 1.0, 1.0)))

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, targets, weight=self.weight)


class Decibels(nn.Module):
    """The ratio of signal to noise: infinite without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.tensor(1.0))

    def forward(self, out: Tensor, wanted: Tensor) -> Tensor:
        return 10 * torch.log10(self.peak / (out - wanted).square().mean())


class Training:
    """A model and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def forward(self) -> Tensor:
        out: Tensor = self.model(torch.randn(4, 4))
        return out

    def step(self, loss: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """One step; returns the model's output."""
        self.optimizer.zero_grad()
        out = self.forward()
        value = nn.functional.cross_entropy(out, TARGETS) if loss is None else loss(out)
        value.backward()
        self.optimizer.step()
        return out


def metric_before_the_backward(training: Training) -> None:
    metric = PerClass()

    def loss(out: Tensor) -> Tensor:
        metric(out, TARGETS).nan_to_num()
        return nn.functional.cross_entropy(out, TARGETS)

    training.step(loss)


def metric_under_no_grad(training: Training) -> None:
    metric, out = PerClass(), training.step()
    with torch.no_grad():
        assert metric(out, TARGETS).nanmean().isfinite()


def observers(training: Training) -> None:
    quantizer, before, after = MinMaxObserver(), Range(), Range()
    for _ in range(2):
        training.optimizer.zero_grad()
        out = after(training.model(before(torch.randn(4, 4))))
        nn.functional.cross_entropy(out, TARGETS).backward()
        training.optimizer.step()
        quantizer(out)


def validation_loss(training: Training) -> None:
    criterion = Weighted()
    training.step(lambda out: criterion(out, TARGETS))
    with torch.no_grad():
        assert criterion(training.forward(), NONE).isnan()


def bad_data(training: Training) -> None:
    training.step()
    assert Decibels()(torch.full((2,), torch.inf), torch.zeros(2)) < 0


HEALTHY: dict[str, Callable[[Training], Any]] = {
    "metric, after the step": lambda t: PerClass()(t.step(), TARGETS).nan_to_num(),
    "metric, detached": lambda t: PerClass()(t.step().detach(), TARGETS).tolist(),
    "metric, before the backward": metric_before_the_backward,
    "metric, under no_grad": metric_under_no_grad,
    "metric, of probabilities": lambda t: PerClass()(t.step().softmax(-1), TARGETS),
    "metric, through NumPy": lambda t: PerClass()(
        torch.from_numpy(t.step().detach().numpy().copy()), TARGETS
    ),
    "ratio without noise": lambda t: Decibels()(out := t.step(), out).clamp(max=100),
    "ratio without noise, detached": lambda t: Decibels()(
        t.step().detach().floor(), torch.zeros(())
    ),
    "criterion, after the step": lambda t: Weighted()(t.step(), NONE).isnan(),
    "criterion, detached": lambda t: Weighted()(t.step().detach(), NONE).isnan(),
    "torch's criterion": lambda t: nn.CrossEntropyLoss(torch.ones(3))(t.step(), NONE).isnan(),
    "validation loss": validation_loss,
    "observers": observers,
    "average": lambda t: Average()(t.step()),
    "bad data that reaches nothing": bad_data,
}


def found_in(script: Callable[[Training], Any]) -> list[fxguard.types.Report]:
    training, found = Training(), list[fxguard.types.Report]()
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        script(training)
    return found


@pytest.mark.parametrize("script", HEALTHY.values(), ids=HEALTHY)
def test_what_reaches_no_loss_and_no_model_stops_nothing(
    script: Callable[[Training], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without fxguard the script ends well; what was bad is noted once, and says what follows."""
    script(Training())
    capsys.readouterr()
    assert found_in(script) == []
    notes = capsys.readouterr().err.splitlines()
    assert all(line.startswith("note: ") and "made " in line for line in notes if "bad" in line)
    assert len(notes) == len(set(notes))


def read_by_the_loss(training: Training) -> None:
    hits = PerClass()(training.step(), TARGETS)
    training.step(lambda out: (out.mean(0) * (1 - hits)).sum())


def read_by_a_model(training: Training) -> None:
    hits = PerClass()(training.step(), TARGETS)
    training.model(torch.cat([hits, hits[:1]])[None])


def read_by_a_model_as_it_is(training: Training) -> None:
    training.step()
    training.model(Weighted(1.0, 0.0, 0.0, 0.0)(torch.zeros(2, 4), TARGETS[1:3]).expand(2, 4))


def scales_gradients(training: Training) -> None:
    factor = PerClass()(training.step(), TARGETS).mean()
    training.optimizer.zero_grad()
    nn.functional.cross_entropy(training.forward(), TARGETS).backward()
    with torch.no_grad():
        for weight in training.model.parameters():
            assert weight.grad is not None
            weight.grad.mul_(factor)
    training.optimizer.step()


def a_loss_after_the_step_of_another(training: Training) -> None:
    """The loss of a second model is computed after the first one's step has ended the followed."""
    out = nn.Linear(4, 3)(torch.randn(4, 4))
    training.step()
    Weighted()(out, NONE).backward()


def as_metric_and_loss(training: Training) -> None:
    criterion = Weighted()
    criterion(training.step().detach(), NONE)
    training.step(lambda out: criterion(out, NONE))


FAULTY: dict[str, tuple[Callable[[Training], Any], str]] = {
    "read by the loss": (read_by_the_loss, "input[1] of mul"),
    "read by a model": (read_by_a_model, "argument `input`"),
    "read by a model, as it is": (read_by_a_model_as_it_is, "cross_entropy made NaN"),
    "scales gradients": (scales_gradients, "SGD's step made weight"),
    "all ignored": (lambda t: t.step(lambda out: Weighted()(out, NONE)), "cross_entropy made NaN"),
    "torch's criterion": (
        lambda t: t.step(lambda out: nn.CrossEntropyLoss(torch.ones(3))(out, NONE)),
        "cross_entropy made NaN",
    ),
    "as metric and loss": (as_metric_and_loss, "cross_entropy made NaN"),
    "another's step": (a_loss_after_the_step_of_another, "cross_entropy made NaN"),
    "a weight of the loss": (
        lambda t: t.step(lambda out: Weighted(1.0, torch.inf, 1.0)(out, TARGETS)),
        "buffer weight holds inf",
    ),
    "average, before its first": (
        lambda t: t.step(lambda out: (out - Average().value).square().mean()),
        "input[1] of sub",
    ),
    "ratio in the loss": (
        lambda t: t.step(lambda out: -Decibels()(out, out.detach())),
        "div made inf",
    ),
}


@pytest.mark.parametrize(("script", "message"), FAULTY.values(), ids=FAULTY)
def test_what_reaches_a_loss_or_a_model_is_found(
    script: Callable[[Training], Any], message: str
) -> None:
    """The same modules; what they return goes on."""
    report = found_in(script)[0]
    assert message in report.message
    returned = "the model returned it" in str(report)
    assert returned is (script is read_by_a_model)  # a criterion is no model


def test_a_bad_argument_says_what_returned_something_bad_before() -> None:
    """A copy of it is not known as the same tensor, so the report says perhaps."""
    [report] = found_in(read_by_a_model)
    assert "PerClass" not in report.message
    assert (
        "div in hits made NaN" in report.why[-1] or "made NaN (test_metrics.py:" in report.why[-1]
    )
    assert report.why[-1].endswith("perhaps it comes from there")


def test_a_script_without_a_model_is_stopped() -> None:
    """A module with buffers alone is then what is to be checked: perhaps a quantized model."""
    found: list[fxguard.types.Report] = []
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        PerClass()(torch.randn(4, 3), TARGETS)
    assert [origin.cause for origin in found[0].origins] == ["zero divisor"]


def test_strict_stops_at_once() -> None:
    """What is absorbed is a fault then, and so is this."""
    found: list[fxguard.types.Report] = []
    training = Training()
    with OutermostModules(Options(on_detect=found.append, strict=True), follow_losses=True):
        PerClass()(training.step().detach(), TARGETS)
    assert found
