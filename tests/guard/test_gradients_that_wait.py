"""Gradients that are measured together are those that reached the leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.measure import waiting
from support.launches import READING, kernels_of, launched_by_checks
from support.pretended_gpu import Launches, pretended


@pytest.fixture
def launches() -> Iterator[Launches]:
    with pretended() as found:
        yield found


class Net(nn.Module):
    """Its second layer divides a gradient by 0 where ``x`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * 0).abs().sqrt())


class Fine(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


X = torch.ones(2, 3)


def told(model: nn.Module, change: Callable[[nn.Module], Any] = lambda model: None) -> list[str]:
    """The leaves with bad gradients that are reported in one backward.

    Args:
        model: it is guarded first.
        change: what a script does to the model then.
    """
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append)
    change(model)
    model(X).sum().backward()
    return [word for word in ("first.weight", "first.bias") if word in "".join(map(str, found))]


BAD = ["first.weight", "first.bias"]


def test_all_gradients_are_read_by_one_launch(launches: Launches) -> None:
    assert told(Fine()) == []
    assert launches.tensors[-1] == 4


def test_a_bad_gradient_is_found(launches: Launches) -> None:
    assert told(Net()) == BAD


def heal(gradient: Tensor) -> None:
    gradient.nan_to_num_(0.0, 0.0, 0.0)


def after_accumulation(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: heal(weight.grad))


def after_ours(model: nn.Module) -> None:
    model(X)  # the guard listens to a weight from its first forward on
    for weight in model.parameters():
        weight.register_hook(heal)


@pytest.mark.parametrize("change", [after_accumulation, after_ours], ids=lambda x: x.__name__)
def test_who_writes_a_gradient_afterwards_hides_nothing(
    change: Callable[[nn.Module], Any], launches: Launches
) -> None:
    """It is measured at once, as it reached the leaf."""
    assert told(Net(), change) == told(Net()) == BAD


class Inside(torch.autograd.Function):
    """Its backward runs another one, through the same weight."""

    weight: Tensor

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            (Inside.weight * 3).sum().backward()
        return gradients[0] * 2


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_those_without_checks(again: bool) -> None:
    """In every bit: accumulated, shared, and inside another backward; in the same memory."""

    def gradients(guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Fine()
        model.last.weight = model.first.weight
        Inside.weight = model.first.bias
        if guarded:
            fxguard.instrument(model)

        def backward() -> None:
            hidden = checkpoint(model, X, use_reentrant=False)
            Inside.apply(hidden).square().sum().backward()

        for _ in range(2 + again):
            backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plain = gradients(guarded=False)
    with pretended():
        found = gradients(guarded=True)
    assert all(map(torch.equal, plain, found))


def test_autograd_takes_over_a_gradient_that_waits() -> None:
    """Nothing is copied for it."""

    def step(model: nn.Module) -> Callable[[], None]:
        def backward() -> None:
            model.zero_grad()
            model(X).sum().backward()

        for _ in range(3):
            backward()
        return backward

    plain = kernels_of(step(Fine()))
    with launched_by_checks():
        checked = kernels_of(step(guarded()))
    more = checked - plain
    assert set(more) <= {READING, "cat", "fill_", "zero_"}, more


def guarded() -> nn.Module:
    model = Fine()
    fxguard.instrument(model)
    return model


def test_a_backward_that_raises_keeps_no_gradient(launches: Launches) -> None:
    """What waits goes with its backward."""

    def fails(gradient: Tensor) -> None:
        raise ValueError("planted")

    model, x = Fine(), torch.ones(2, 3, requires_grad=True)
    fxguard.instrument(model)
    model(x).sum().backward()
    kept: list[weakref.ref[Any]] = []

    def begin(self: waiting.Waiting) -> None:
        kept.append(weakref.ref(self))
        old(self)

    class Seen(waiting.Waiting):
        __slots__ = ("__weakref__",)

    old = waiting.Waiting.__init__
    x.register_hook(fails)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seen, "__init__", begin)
        patch.setattr(waiting, "Waiting", Seen)
        with pytest.raises(ValueError, match="planted"):
            model(x).sum().backward()
    gc.collect()
    assert kept
    assert not any(reference() for reference in kept)
