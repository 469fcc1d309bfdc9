"""A guarded model is pickled as the plain model, and copied as a guarded one."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxguard
from fxguard.install.instrumented import find_guard


class Packs(nn.Module):
    """A class that says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.file: Any = io.BytesIO()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "file"}

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


class Slots(nn.Linear):
    """A class with a slot beside its attributes: their states are a pair."""

    __slots__ = ("label",)


def rectified(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def own_forward() -> nn.Module:
    """A model whose forward is an attribute of its own."""
    model = nn.Linear(2, 1)
    model.forward = rectified  # type: ignore[method-assign]
    return model


def slots() -> nn.Module:
    model = Slots(2, 1)
    model.label = "kept"
    return model


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 1)))


MAKERS = [lambda: nn.Linear(2, 1), Packs, slots, own_forward, traced]


def through_torch(model: nn.Module) -> Any:
    box = io.BytesIO()
    torch.save(model, box)
    box.seek(0)
    return torch.load(box, weights_only=False)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "through",
    [through_torch, *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in (2, 4, 5))],
)
def test_what_is_loaded_is_the_plain_model(make: Any, through: Any) -> None:
    """It has the attributes that the plain model's copy has, and computes the same; the model
    that was saved stays guarded."""
    torch.manual_seed(0)
    plain = make()
    expected = through(plain)
    model = fxguard.instrument(plain)
    loaded = through(model)
    assert type(loaded).__name__ == type(expected).__name__
    assert set(loaded.__dict__) == set(expected.__dict__)
    assert getattr(loaded, "label", None) == getattr(expected, "label", None)
    x = torch.ones(3, 2)
    assert torch.equal(loaded(x), expected(x))
    with pytest.raises(fxguard.NonFiniteError):
        model(x * torch.nan)
    loaded(x * torch.nan)  # nobody guards it


def test_the_pickle_does_not_know_fxguard(tmp_path: Path) -> None:
    """No name of fxguard is in the file, also where the model is a part of another."""
    part = fxguard.instrument(nn.Linear(2, 1))
    assert b"fxguard" not in pickle.dumps(nn.Sequential(part))


@pytest.mark.parametrize("make", MAKERS)
def test_a_deep_copy_is_guarded(make: Any) -> None:
    """A copy has a guard of its own, and is pickled like the model."""
    model = fxguard.instrument(make())
    twin = copy.deepcopy(model)
    assert find_guard(twin) is not None
    assert find_guard(twin) is not find_guard(model)
    with pytest.raises(fxguard.NonFiniteError):
        twin(torch.full((3, 2), torch.nan))
    assert set(pickle.loads(pickle.dumps(twin)).__dict__) == set(
        pickle.loads(pickle.dumps(fxguard.remove(model))).__dict__
    )
