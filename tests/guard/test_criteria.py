"""Modules without weights that read outputs: what they return counts where it gets to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

IGNORED = nn.CrossEntropyLoss(ignore_index=0)  # NaN if all targets are 0
TARGETS = torch.tensor([0, 1, 2, 1])
NONE = torch.zeros_like(TARGETS)


class Perplexity(nn.Module):
    """A metric that overflows, with a criterion inside that reads no output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(reduction="none")

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = self.inner(logits * 1.5, targets)
        return (1e4 * value).exp()


class Root(nn.Module):
    """A criterion of the script's own, and a transform: NaN below zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 100).sqrt()


class Divergence(nn.Module):
    """As written by hand: 0 * log(0) is NaN."""

    def forward(self, logits: Tensor, p: Tensor) -> Tensor:
        return p * (p.log() - logits.log_softmax(-1))


def unreachable(out: Tensor) -> Tensor:
    """A target that is longer than its input has no alignment: CTC is inf."""
    lengths = torch.tensor([1]), torch.tensor([2])
    log_probs = out.view(4, 1, 3)[:1]
    value: Tensor = nn.CTCLoss(reduction="none")(log_probs, torch.tensor([[1, 2]]), *lengths)
    return value.isinf().sum()


def divergence(out: Tensor) -> Tensor:
    p = nn.functional.one_hot(TARGETS, 3).float()
    value: Tensor = Divergence()(out, p)
    return torch.where(p > 0, value, 0.0).sum()


def perplexity(out: Tensor) -> Tensor:
    value: Tensor = Perplexity()(out, TARGETS)
    return value[value.isfinite()].sum()


def masked(out: Tensor) -> Tensor:
    best: Tensor = nn.LogSoftmax(-1)(out.detach().fill_(-torch.inf)).argmax(-1)
    return best


ABSORBED: list[Callable[[Tensor], Tensor]] = [
    lambda out: IGNORED(out, NONE).nan_to_num(),
    lambda out: IGNORED(out.view(-1, 3), NONE).isnan(),
    lambda out: nn.MSELoss()(out, torch.full_like(out, 1e30)).isfinite(),
    unreachable,
    divergence,
    perplexity,
    masked,
]


def found_in(script: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Any]:
    """What is found in a script, in the order in which it came."""
    torch.manual_seed(0)
    model, found = nn.Linear(4, 3), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        script(model, optimizer)
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step of training."""
    optimizer.zero_grad()
    out: Tensor = model(torch.randn(4, 4))
    IGNORED(out, TARGETS).backward()
    optimizer.step()
    return out


@pytest.mark.parametrize("metric", ABSORBED)
def test_a_metric_of_detached_outputs_may_be_bad(metric: Callable[[Tensor], Tensor]) -> None:
    """After the step, where no loss is followed; a test of the script absorbs what is bad."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            out = step(model, optimizer)
            with torch.no_grad():
                assert metric(out.detach()).isfinite().all()

    assert not found_in(script)


@pytest.mark.parametrize("metric", ABSORBED)
def test_a_validation_loss_may_be_bad(metric: Callable[[Tensor], Tensor]) -> None:
    """Under no_grad, no backward can begin with it."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(model, optimizer)
        with torch.no_grad():
            assert metric(model(torch.randn(4, 4))).isfinite().all()

    assert not found_in(script)


def after_metrics(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same criterion, first as a metric and then as the loss."""
    IGNORED(step(model, optimizer).detach(), NONE)
    IGNORED(model(torch.randn(4, 4)), NONE).backward()


def of_its_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    Root()(step(model, optimizer).detach())
    Root()(model(torch.randn(4, 4))).mean().backward()


def after_the_step_of_another(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As in actor and critic: the loss of the second model is computed after the first's step."""
    out = nn.Linear(4, 3)(torch.randn(4, 4))
    step(model, optimizer)
    IGNORED(out, NONE).backward()


def of_a_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A backward begins with what a detached output and a weight of the script made."""
    out, scale = step(model, optimizer).detach(), torch.ones(4, 3, requires_grad=True)
    nn.MSELoss()(out, scale * torch.inf).backward()


def of_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A transform that reads no output is named when a model reads what it returned."""
    step(model, optimizer)
    with torch.no_grad():
        model(Root()(torch.randn(4, 4)))


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (after_metrics, "cross_entropy"),
        (of_its_own, "sqrt"),
        (after_the_step_of_another, "cross_entropy"),
        (of_a_weight, "mse_loss"),
        (of_data, "sqrt"),
    ],
)
def test_a_bad_loss_is_found(script: Callable[..., None], kind: str) -> None:
    """Clean twins are above: the same modules, and no backward begins with what they return."""
    assert [origin.frame.kind for origin in found_in(script)[0].origins] == [kind]
