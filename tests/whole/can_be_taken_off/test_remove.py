"""After ``remove`` a model is what it was before ``instrument``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.same_results import assert_same, results


def test_remove_takes_everything_off() -> None:
    """After ``remove`` the model has the attributes that it had."""
    model = nn.Linear(2, 1)
    before = dict(model.__dict__)
    fxguard.remove(fxguard.instrument(model))
    assert model.__dict__ == before


def test_removing_gives_the_original_results_back() -> None:
    """After remove the model runs as if it had never been instrumented."""
    entry = zoo.ZOO["bert"]
    inputs = entry.inputs(torch.float32, True)
    expected = results(entry.model(), inputs, train=False)
    model = fxguard.instrument(entry.model())
    results(model, inputs, train=False)
    assert_same(expected, results(fxguard.remove(model), inputs, train=False))
    assert "forward" not in model.__dict__


def test_a_forward_that_the_model_owned_is_put_back() -> None:
    """A model whose forward was replaced before gets that very function back."""
    model = zoo.ZOO["twice"].model()

    def replaced(x: Tensor) -> Tensor:
        return type(model).forward(model, x) + 1

    model.forward = replaced
    x = torch.randn(3, 4)
    expected = model(x)
    fxguard.instrument(model)
    assert torch.equal(model(x), expected)
    fxguard.remove(model)
    assert model.forward is replaced


def test_a_forward_that_was_wrapped_afterwards_is_left_alone() -> None:
    """Mixed-precision helpers wrap the guarded forward: it stays guarded, remove says why not."""
    model = fxguard.instrument(zoo.ZOO["twice"].model())
    guarded = model.forward

    def wrapped(self: nn.Module, x: Tensor) -> Tensor:
        return guarded.__func__(self, x) + 1

    # As accelerate does: the function is taken out of the method and bound to the model again.
    model.forward = wrapped.__get__(model)
    model(torch.randn(3, 4))
    assert fxguard.guard_of(model).batch_number == 1
    with pytest.raises(fxguard.FxguardError, match="was replaced after"):
        fxguard.remove(model)
    model.forward = guarded
    fxguard.remove(model)
    assert "forward" not in model.__dict__
    assert "_fxguard" not in model.__dict__
