"""Gradients through activation checkpointing are those of the plain model, dropout included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxguard
from fxguard.capture import backend
from support.needs import TORCH


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.options = {"use_reentrant": False, **options}

    def compute(self, x: Tensor) -> Tensor:
        return self.dropout(torch.sin(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.compute, x, **self.options))  # type: ignore[arg-type]


class Nested(nn.Module):
    """A checkpoint inside of a checkpoint, and one that keeps what a policy says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block(context_fn=keep_products)
        self.dropout = nn.Dropout(0.5)

    def compute(self, x: Tensor) -> Tensor:
        return self.first(self.dropout(x) * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[assignment]
        return self.dropout(self.second(x))


def keep_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def gradients(run: Any, model: nn.Module) -> list[Tensor]:
    """Of the weights and of the input, and the output."""
    torch.manual_seed(1)
    x = torch.ones(4, 8, requires_grad=True)
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("model_class", [Block, Nested])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("backend", ["", "eager"])
def test_dropout_is_repeated(model_class: type[nn.Module], replay: bool, backend: str) -> None:
    torch.manual_seed(0)
    plain = model_class()
    model = fxguard.instrument(copy.deepcopy(plain), replay=replay)
    run = torch.compile(model, backend=backend) if backend else model
    assert same(gradients(run, model), gradients(plain, plain))
    assert "not checked" not in fxguard.guard_of(model).coverage()


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 draws the same numbers by itself")
def test_without_it_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch makes of it, and why this is here. If it fails, checkpointing.py can go."""
    monkeypatch.setattr(backend, "with_repeatable_checkpoints", lambda graph: graph)
    plain = Block()
    model = fxguard.instrument(copy.deepcopy(plain))
    assert not same(gradients(model, model), gradients(plain, plain))


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("where", ["first.inner", "second.inner"])
def test_found_in_a_body(where: str, replay: bool) -> None:
    """Also in a body inside of a body, whose graph the second run shares."""
    model = Nested()
    with torch.no_grad():
        model.get_submodule(where).weight.fill_(3e38)
    fxguard.instrument(model, replay=replay)
    torch.manual_seed(0)  # dropout leaves something to overflow
    with pytest.raises(fxguard.NonFiniteError, match=f"linear in {where} made") as caught:
        model(torch.full((4, 8), 8.0))
    assert caught.value.report.repeated
