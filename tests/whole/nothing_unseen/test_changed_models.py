"""A model that changes after ``instrument`` is checked as it is, under the names of today."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.install.names import Names
from support.cut_models import (
    HIGH,
    LOW,
    Bare,
    Block,
    BreaksBefore,
)
from support.ways import EAGER, WAYS, assert_same_bits, prepared, the_way


class Growing(nn.Module):
    """Calls whatever blocks it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Tame()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + 1e3


def swapped(model: Growing) -> str:
    model.blocks[0] = Block()
    return "blocks.0"


def added(model: Growing) -> str:
    model.blocks.append(Block())
    return "blocks.1"


def inserted(model: Growing) -> str:
    model.blocks.insert(0, Tame())
    model.blocks.append(Block())
    return "blocks.2"


def added_with_a_break(model: Growing) -> str:
    model.blocks.append(BreaksBefore())
    return "blocks.1"


CHANGES = {change.__name__: change for change in (swapped, added, inserted, added_with_a_break)}


def check_change(change: Callable[[Growing], str], way: str) -> None:
    reports: list[fxguard.types.Report] = []
    with the_way(way):
        model = fxguard.instrument(Growing(), on_detect=reports.append)
        guarded = prepared(model, way)
        plain = Growing()
        plain.load_state_dict(model.state_dict())
        assert_same_bits(guarded(HIGH), plain(HIGH))
        assert not reports
        name = change(model)
        change(plain)
        plain.load_state_dict(model.state_dict())
        assert_same_bits(guarded(HIGH), plain(HIGH))
        blamed = reports[-1].origins[0]
        assert (blamed.what, blamed.frame.name) == ("exp", name), blamed.message
        modules = [f.name for f in fxguard.guard_of(model).frames() if not f.is_op]
        assert f"{name}.linear" in modules
        with torch.no_grad():
            model.get_submodule(name).linear.weight[0, 0] = torch.nan
        guarded(LOW)
        assert reports[-1].origins[-1].what == f"weight {name}.linear.weight"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_came_later_have_names(change: str, way: str) -> None:
    """A part that was swapped or added after `instrument` is checked under its own name."""
    check_change(CHANGES[change], way)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_came_later_have_names(way: str) -> None:
    """A weight that was replaced after the first forward is blamed as that weight."""
    reports: list[fxguard.types.Report] = []
    with the_way(way):
        model = fxguard.instrument(Bare(), on_detect=reports.append)
        guarded = prepared(model, way)
        guarded(LOW)
        model.inner.linear.weight = nn.Parameter(torch.full((4, 4), torch.nan))
        guarded(LOW)
    assert [o.what for o in reports[0].origins[:1]] == ["weight inner.linear.weight"]


def only_once(self: Names, read: Callable[[Names], None] = Names.read) -> None:
    if not self.modules:
        read(self)


def test_without_names_read_again_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of modules are read in each batch, not once."""
    monkeypatch.setattr(Names, "read", only_once)
    with pytest.raises(AssertionError, match=r"^exp made"):
        check_change(added_with_a_break, EAGER)


def test_lent_weights_take_their_names_along() -> None:
    """Another tensor may have their identities when they are gone, such as a loss."""
    model = Tame()
    names = Names(model, lambda: None)
    model.register_forward_pre_hook(lambda *_: names.read())
    model(torch.ones(1, 4))
    own = dict(names.tensors)
    lent = {name: weight * 2 for name, weight in model.named_parameters()}
    torch.func.functional_call(model, lent, (torch.ones(1, 4),))
    assert names.tensors.keys() == {id(weight) for weight in lent.values()}
    del lent
    assert not names.tensors
    model(torch.ones(1, 4))
    assert names.tensors == own
