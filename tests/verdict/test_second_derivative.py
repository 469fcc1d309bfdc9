"""Bad gradients of gradients are told with the operation that has no derivative there."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard

Layer = Callable[[Tensor], Tensor]

STEEP: dict[str, tuple[Layer, str]] = {
    "std": (lambda h: h.std(dim=0, keepdim=True).expand_as(h), "std (test_second_derivative.py:"),
    "std of rows": (lambda h: h.std(1, keepdim=True) * h, "std (test_second_derivative.py:"),
    "a root of a square": (lambda h: (h * h).pow(0.75), "pow (test_second_derivative.py:"),
    "a norm by hand": (lambda h: h.square().sqrt() * h, "sqrt (test_second_derivative.py:"),
}

HEALTHY: dict[str, Layer] = {
    "relu": lambda h: h,
    "a norm": lambda h: h.norm(dim=1, keepdim=True) * h,
    "a smooth deviation": lambda h: (h.var(dim=0, keepdim=True) + 1e-8).sqrt().expand_as(h),
}


class Energy(nn.Module):
    """An energy whose gradient with respect to positions is a force."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.first, self.last, self.layer = nn.Linear(3, 8), nn.Linear(8, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x) - 1)
        energy: Tensor = self.last(self.layer(hidden))
        return energy


def _step(model: nn.Module, *, order: int = 2) -> None:
    x = torch.randn(16, 3, requires_grad=True)
    energy = model(x).sum()
    if order == 2:
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        energy = force.square().mean()
    energy.backward()


def _found(layer: Layer, *, order: int = 2, turns: int = 1) -> fxguard.NonFiniteError | None:
    torch.manual_seed(0)
    model = Energy(layer)
    fxguard.instrument(model)
    try:
        for _ in range(turns):
            _step(model, order=order)
    except fxguard.NonFiniteError as error:
        return error
    return None


@pytest.mark.parametrize("name", STEEP)
def test_the_operation_is_named(name: str) -> None:
    layer, title = STEEP[name]
    found = _found(layer)
    assert found is not None
    text = str(found)
    assert "it is a gradient of a gradient" in text
    assert title in text
    assert "derivative at [" in text
    assert "  fix: " in text


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_forces_are_left_alone(name: str) -> None:
    assert _found(HEALTHY[name], turns=3) is None


def test_a_hook_of_the_user_is_not_blamed_on_an_operation() -> None:
    """A second derivative that nobody takes may be infinite."""
    torch.manual_seed(0)
    model = Energy(STEEP["std"][0])
    fxguard.instrument(model)
    model.last.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(fxguard.NonFiniteError) as found:
        _step(model, order=1)
    assert "gradient of a gradient" not in str(found.value)


def test_nothing_of_it_is_kept() -> None:
    """Graph runs whose gradients were differentiated are known, and their tensors are not kept."""
    model = Energy(HEALTHY["a norm"])
    fxguard.instrument(model)
    references = []
    for _ in range(3):
        x = torch.randn(16, 3, requires_grad=True)
        energy = model(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        force.square().mean().backward()
        model(x.detach()).sum().backward()
        references += [weakref.ref(each) for each in (x, energy, force)]
        del x, energy, force
    gc.collect()
    assert not any(each() is not None for each in references)
    x = torch.randn(16, 3, requires_grad=True)
    energy = model(x)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    references = [weakref.ref(each) for each in (x, energy, force)]
    del x, energy, force  # no backward follows
    gc.collect()
    assert not any(each() is not None for each in references)


def test_an_earlier_force_is_not_blamed() -> None:
    """What an earlier step differentiated is known until a step differentiates nothing."""
    torch.manual_seed(0)
    model = Energy(STEEP["std"][0])
    spoils: list[float] = []
    fxguard.instrument(model)
    model.last.weight.register_hook(lambda gradient: gradient * math.prod(spoils))
    x = torch.randn(16, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    _step(model, order=1)
    spoils.append(math.nan)
    with pytest.raises(fxguard.NonFiniteError) as found:
        _step(model, order=1)
    assert "gradient of a gradient" not in str(found.value)
