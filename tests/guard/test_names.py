"""Names follow what a model holds, and are read again only where that is something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxguard.guard._names import Names
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


def test_a_scripted_module_is_read_each_time() -> None:
    """What it holds does not stand among its attributes."""
    model, reads = nn.Sequential(torch.jit.script(nn.Linear(2, 2))), []
    names = Names(model, lambda: reads.append(1))
    names.read()
    names.read()
    assert len(reads) == 2
