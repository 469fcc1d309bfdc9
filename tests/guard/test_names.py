"""Names follow what a model holds, and are read again only where that is something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxguard
from fxguard.install.names import Names
from fxguard.records import Role


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.ones(2))


def nothing(model: Model) -> None:
    model.first.weight.data.zero_()


def another_weight(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.ones(2, 2))


def another_buffer(model: Model) -> None:
    model.scale = torch.zeros(2)


def another_module(model: Model) -> None:
    model.second[0] = nn.BatchNorm1d(2)


def one_module_more(model: Model) -> None:
    model.second.append(nn.ReLU())


def another_name(model: Model) -> None:
    model.third = model.__dict__["_modules"].pop("first")


def a_weight_that_is_a_buffer_now(model: Model) -> None:
    bias = model.first._parameters.pop("bias")
    model.first._buffers["bias"] = bias


def another_dictionary(model: Model) -> None:
    model.first._parameters = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": None}


CHANGES = (
    another_weight,
    another_buffer,
    another_module,
    one_module_more,
    another_name,
    a_weight_that_is_a_buffer_now,
    another_dictionary,
)


def expected(model: Model) -> tuple[dict[int, str], dict[int, tuple[Role, str]]]:
    modules = {id(module): name for name, module in model.named_modules() if name}
    weights = {id(p): (Role.WEIGHT, name) for name, p in model.named_parameters()}
    buffers = {id(b): (Role.BUFFER, name) for name, b in model.named_buffers()}
    return modules, weights | buffers


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Model], None]) -> None:
    """Whatever a module holds now, and under which name."""
    model, reads = Model(), []
    names = Names(model, lambda: reads.append(1))
    names.read()
    change(model)
    names.read()
    assert (names.modules, names.tensors) == expected(model)
    assert len(reads) == 2


def test_what_is_the_same_is_not_read() -> None:
    """Also where weights were written."""
    model, reads = Model(), []
    names = Names(model, lambda: reads.append(1))
    for _ in range(3):
        names.read()
        nothing(model)
    assert len(reads) == 1
    assert (names.modules, names.tensors) == expected(model)


def test_a_module_is_found_where_it_stands_now() -> None:
    """By its qualified name; what is gone, is no module, or is scripted inside is not found."""
    model = Model()
    names = Names(model, lambda: None)
    assert names.module_at("second.0") is model.second[0]
    another_module(model)
    assert names.module_at("second.0") is model.second[0]
    model.second.append(torch.jit.script(nn.Sequential(nn.ReLU())))
    for name in ("third", "second.2", "first.weight", "second.1.0", "first.x.y"):
        assert names.module_at(name) is None


def test_modules_between_graphs_have_the_names_that_they_have_now() -> None:
    """One that was moved, replaced or added since the last call, and is called by Python."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in list(self.parts.values()):
                x = part(x)
            return x

    model = fxguard.instrument(Between())
    guard = fxguard.guard_of(model)

    def shown() -> list[str]:
        model(torch.ones(1, 2))
        return [frame.name for frame in guard.frames() if frame.name.startswith("parts.")]

    assert shown() == ["parts.a", "parts.b"]
    model.parts["c"] = model.parts.pop("a")  # the same module, with another name
    assert shown() == ["parts.b", "parts.c"]
    model.parts["b"] = nn.Linear(2, 2)
    model.parts["d"] = nn.Linear(2, 2)
    assert shown() == ["parts.b", "parts.c", "parts.d"]


def test_a_scripted_module_is_read_each_time() -> None:
    """What it holds does not stand among its attributes."""
    model, reads = nn.Sequential(torch.jit.script(nn.Linear(2, 2))), []
    names = Names(model, lambda: reads.append(1))
    names.read()
    names.read()
    assert len(reads) == 2
