"""What of a loss is known, and for how long: as long as the script holds it, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

X = torch.randn(8, 4)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is gone, is gone at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plain_item(y: Tensor) -> Any:
    return y.softmax(-1).max(-1).values.mean().item()


def compiled_loss(y: Tensor) -> Any:
    return COMPILED(y).item()


def with_weights(y: Tensor) -> Any:
    penalty = sum((weight.square().sum() for weight in MODEL.parameters()), torch.zeros(()))
    return float(y.sum() + penalty)


def written_in_place(y: Tensor) -> Any:
    y.mul_(2).add_(1)
    part = y * 1
    part[0] = 0
    part.relu_()
    return part.sum().item()


def of_a_function(y: Tensor) -> Any:
    return Doubled.apply(y * 1).sum().item()  # type: ignore[no-untyped-call]


def gradient_of_inputs(y: Tensor) -> Any:
    return torch.autograd.grad(y.square().sum(), tuple(MODEL.parameters()))[0].sum()


class Doubled(torch.autograd.Function):
    """Is not seen by any mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@torch.compile(backend="eager")
def COMPILED(y: Tensor) -> Tensor:  # noqa: N802
    return y.exp().log().square().mean()


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
EVALUATIONS = [
    plain_item,
    compiled_loss,
    with_weights,
    written_in_place,
    of_a_function,
    gradient_of_inputs,
]


@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_an_evaluation_keeps_no_output(evaluate: Callable[[Tensor], Any]) -> None:
    """Without no_grad, and as soon as the script has dropped it."""
    seen = []
    with fxguard.watch(MODEL):
        for _ in range(3):
            y = MODEL(X)
            seen.append(weakref.ref(y))
            evaluate(y)
            del y
            assert [each() for each in seen] == [None] * len(seen)


def test_a_running_total_keeps_no_output() -> None:
    """Its numbers come from all batches; what they were computed from is gone."""
    total, seen = torch.zeros(()), []
    with fxguard.watch(MODEL):
        for _ in range(200):
            y = MODEL(X)
            seen.append(weakref.ref(y))
            total = total + y.square().mean().detach()
        del y
        assert sum(each() is not None for each in seen) < 100
    assert float(total) > 0


def test_what_was_read_goes_with_the_graph_of_its_backward() -> None:
    """The loss is still a variable during the next forward, as in most loops."""
    with fxguard.watch(MODEL):
        y = MODEL(X)
        seen = weakref.ref(y)
        loss = (y + 1).mean()
        del y
        assert seen() is not None
        loss.backward()
        assert seen() is None
        assert loss.isfinite()


def bad(y: Tensor) -> Tensor:
    return (y * 0).sum().log()


def healthy(y: Tensor) -> Tensor:
    return y.square().sum()


def evaluated_between(loss: Tensor) -> Tensor:
    for _ in range(150):  # more values than are kept of what leads nowhere
        plain_item(MODEL(X))
    return loss


def after_another_backward(loss: Tensor) -> Tensor:
    healthy(MODEL(X)).backward()
    MODEL(X)
    return loss


def accumulated(loss: Tensor) -> Tensor:
    return loss + sum(healthy(MODEL(X)) for _ in range(5))


def in_a_list(loss: Tensor) -> Tensor:
    losses = [loss, *(healthy(MODEL(X)) for _ in range(5))]
    return torch.stack(losses).mean()


LATER = [evaluated_between, after_another_backward, accumulated, in_a_list]


@pytest.mark.parametrize("later", LATER)
def test_a_loss_is_known_while_it_is_held(later: Callable[[Tensor], Tensor]) -> None:
    """Whatever runs between it and its backward; its healthy twin raises nothing."""
    for make in (healthy, bad):
        found: list[Any] = []
        with fxguard.watch(MODEL, on_detect=found.append):
            later(make(MODEL(X))).backward()
        if make is healthy:
            assert not found
        else:
            assert found[0].origins[0].frame.kind == "log"
            assert "log()" in found[0].origins[0].frame.source.code


@pytest.mark.parametrize("make", [healthy, bad])
def test_a_compiled_loss_is_known_after_evaluations(make: Callable[[Tensor], Tensor]) -> None:
    """What led nowhere since is forgotten, and its graph is not."""
    found: list[Any] = []
    with fxguard.watch(MODEL, on_detect=found.append):
        loss = torch.compile(make, backend="eager")(MODEL(X))
        evaluated_between(loss).backward()
    kinds = [origin.frame.kind for report in found[:1] for origin in report.origins]
    assert kinds == ["log"] * (make is bad)


def test_two_losses_of_one_output() -> None:
    """As in adversarial training: the second is bad, and its backward comes after the first."""
    found: list[Any] = []
    critic = nn.Linear(4, 1)
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        made = MODEL(X)
        healthy(critic(made.detach())).backward()
        (critic(made).mean() + bad(made)).backward()
    assert [origin.frame.kind for origin in found[0].origins] == ["log"]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_a_bad_gradient_of_a_kept_loss_has_its_operation(kept: bool) -> None:
    """The operations run again, with the inputs that they had."""
    found: list[Any] = []
    with fxguard.watch(MODEL, on_detect=found.append):
        loss = (MODEL(X) * 0).square().sum(-1).sqrt().sum()  # 0/0 in the backward of sqrt
        if kept:
            after_another_backward(evaluated_between(loss))
        loss.backward()
    assert found[0].origins[0].frame.kind == "sqrt"
