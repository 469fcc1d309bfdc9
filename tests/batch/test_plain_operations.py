"""Plain operations of a loss: in brief they say what they say in full."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxguard
from fxguard.batch import loss as losses
from fxguard.batch.loss import Loss
from fxguard.batch.plain_operations import LossBatch, is_plain
from fxguard.errors import FxguardError


def entropy(out: Tensor) -> Tensor:
    """Many operations in a row, with a move, keywords and numbers."""
    logits = out - out.logsumexp(dim=-1, keepdim=True)
    p = functional.softmax(input=logits, dim=-1)
    return -(p.reshape(-1) * logits.clamp(min=-50.0).flatten()).sum() / 4


def of_parts(out: Tensor) -> Tensor:
    """Tensors in lists, integers, a mask, a tensor that is read twice, and other inputs."""
    weight, target = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0, 2, 1, 1])
    classes = out.argmax(dim=1)
    loss = functional.cross_entropy(out, target, weight=weight)
    both = torch.stack([out * out, 1 - out]).max(dim=0).values
    return loss + torch.where(classes == target, both.mean(1), both.sum(1)).mean()


def with_writes(out: Tensor) -> Tensor:
    """Operations that are not plain, among those that are."""
    y = out * 2
    y[0] = 3.0
    y.add_(out).mul_(0.5)
    kept = functional.dropout(y, 0.5)
    one, two = kept.square().split([1, 3])
    return one.detach().double().sum() + two.to(torch.float64).sum()


def without_gradients(out: Tensor) -> Tensor:
    """What needs no gradient is noted, too; a scalar of the model's dtype comes last."""
    with torch.no_grad():
        scale = out.abs().max() + 1
    return (out / scale).half().float().mean()


PROGRAMS = [entropy, of_parts, with_writes, without_gradients]


def heard_of(program: Callable[[Tensor], Tensor], monkeypatch: Any) -> dict[str, Any]:
    """What the batch and the tape of a loss hold when its backward begins."""
    found: dict[str, Any] = {}
    begins = Loss.backward_comes

    def hear(self: Loss, roots: Any) -> None:
        batch = self.batch
        found["briefly"] = batch._has_brief
        found["events"] = list(batch.events)
        found["values"], found["pairs"] = list(batch.values), list(map(tuple, batch.pairs))
        found["root"] = [batch.live.key_of(root) for root in roots]
        made = [value for x in roots if (value := self.tape.value_of(x)) is not None]
        with contextlib.suppress(FxguardError):  # an input was written
            run, _ = self.tape.run(made)
            found["tape"] = run.graph_module.code, [tuple(x.shape) for x in run.args or ()]
            found["lines"] = [each.meta.get("stack_trace") for each in run.graph_module.graph.nodes]
        begins(self, roots)

    with monkeypatch.context() as patch:
        patch.setattr(Loss, "backward_comes", hear)
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        with fxguard.watch(model):
            program(model(torch.randn(4, 5))).backward()
    assert model.weight.grad is not None
    found["gradient"] = model.weight.grad.tolist()
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_brief_is_full(program: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    """Events, values, magnitudes, and what runs again are the same."""
    brief = heard_of(program, monkeypatch)
    monkeypatch.setattr(losses, "is_plain", lambda func: False)
    full = heard_of(program, monkeypatch)
    assert brief.pop("briefly") is not full.pop("briefly")
    assert brief == full


def bad_in_forward(out: Tensor) -> Tensor:
    return (out - out).log().mean()


def bad_in_backward(out: Tensor) -> Tensor:
    return (out - out).abs().sqrt().sum() + out.square().mean()


def raises(out: Tensor) -> Tensor:
    return (out * 2) @ out


@pytest.mark.parametrize("program", [bad_in_forward, bad_in_backward, raises])
def test_the_report_is_the_same(program: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    """Whether a loss was written down in brief or in full."""
    said = []
    for in_full in False, True:
        if in_full:
            monkeypatch.setattr(losses, "is_plain", lambda func: False)
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        with fxguard.watch(model), pytest.raises((fxguard.NonFiniteError, RuntimeError)) as raised:
            program(model(torch.randn(4, 5))).backward()
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert program is raises or "sqrt" in said[0] or "log made" in said[0]


def test_what_is_dropped_is_gone(monkeypatch: Any) -> None:
    """A loss that is never differentiated keeps no tensor, however long it goes on."""
    model = nn.Linear(5, 3)
    sizes = []
    seen = LossBatch.ran

    def hear(self: LossBatch, *args: Any) -> None:
        seen(self, *args)
        sizes.append(len(self.pairs))

    monkeypatch.setattr(LossBatch, "ran", hear)
    with fxguard.watch(model):
        for _ in range(200):
            out = model(torch.randn(4, 5))
            middle = out.square() + torch.ones(4, 1)
            loss = middle.sum()
            gone = [weakref.ref(each) for each in (out, middle, loss)]
            del out, middle, loss
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert max(sizes) < 1000


def test_written_after_it_was_read(monkeypatch: Any) -> None:
    """A value that a later operation reads after a write has the numbers of then."""

    def program(out: Tensor) -> Tensor:
        y = out.square()
        before = y.sum()
        with torch.no_grad():
            y.detach().fill_(7.0)
        return before + (y * 1).sum()

    assert (7.0, 7.0) in heard_of(program, monkeypatch)["pairs"]


def mine(x: Tensor) -> Tensor:
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(mine, (x,), x)
    return x


@pytest.mark.parametrize(
    "func",
    [
        *(torch.dropout, Tensor.add_, Tensor.backward, functional.batch_norm, Tensor.item),
        *(
            Tensor.__setitem__,
            torch.multinomial,
            functional.dropout,
            torch.as_tensor,
            torch.cond,
            mine,
        ),
        torch.distributed.all_reduce,
    ],
)
def test_not_plain(func: Any) -> None:
    """What writes, draws, hands out numbers, sends, or is a user's own."""
    assert not is_plain(func)


@pytest.mark.parametrize("func", [torch.add, Tensor.mul, functional.cross_entropy, Tensor.reshape])
def test_plain(func: Any) -> None:
    """What only reads."""
    assert is_plain(func)
