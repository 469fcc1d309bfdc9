"""Operations that were noted as they ran, and run again."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxguard.batch.kept_run import KeptTape
from fxguard.batch.runs_again import runs_of
from fxguard.batch.tape import Tape
from fxguard.rerun.gradients import gradients_of


class Noting(TorchFunctionMode):
    """Notes every operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape({})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = self.tape.before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.tape.after(noted, result, None)
        return result


def views(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.T.chunk(2)
    return (first @ second.mT).unbind(1)[1].view(-1, 1).expand(-1, 3).real.sum() + x[:, 1].mean()


def writes(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x += 1
    x[0] = y[0]
    x[:, 1].mul_(3)
    out = torch.empty(0)
    torch.sub(y, 1, out=out)
    return x.relu_().sum() + out.sum()


def numbers(x: Tensor, y: Tensor) -> Tensor:
    return (2 - x).square().mean() / 3 + 1 / (1 + x.std()) + 2 ** x.mean() - x.shape[0] * x.max()


def constants(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        weight = x.softmax(-1)
    chosen = torch.where(x > 0, x, x.detach() * 3)[(y > 0).any(-1)]
    return (chosen.sum() * weight).sum() + F.cross_entropy(x, y.argmax(-1), weight=y[0].abs())


def lists(x: Tensor, y: Tensor) -> Tensor:
    parts = torch.split(x, [1, 3], dim=0)
    joined = torch.cat([parts[1], parts[0], y], dim=0)
    return torch.stack([joined.amax(0), torch.einsum("ij->j", x)]).var()


def random(x: Tensor, y: Tensor) -> Tensor:
    return (F.dropout(x, 0.5) + torch.randn_like(x) * x).square().sum()


LOSSES = [views, writes, numbers, constants, lists, random]


def noted(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tape, Tensor, Tensor]:
    """The tape of a loss, what it was given, and the loss."""
    torch.manual_seed(0)
    x = (torch.randn(4, 6, requires_grad=True) * 1).T.contiguous().T  # no leaf
    y = torch.randn(4, 6)
    x.retain_grad()
    with Noting() as noting:
        made = loss(x, y)
    return noting.tape, x, made


@pytest.mark.parametrize("loss", LOSSES)
def test_it_computes_the_same_and_so_does_its_backward(loss: Any) -> None:
    """Values and gradients, to the bit."""
    tape, x, made = noted(loss)
    value = tape.value_of(made)
    assert value is not None
    state = torch.get_rng_state()
    (kept,) = runs_of([KeptTape(tape, value, 0, 0, {0: torch.tensor(1.0)})])
    gradients = gradients_of(kept)
    assert torch.equal(torch.get_rng_state(), state)
    made.backward()
    assert x.grad is not None
    (position,) = [i for i, value in enumerate(kept.args) if value is x]
    found = gradients.totals[gradients.arguments[position]]
    magnitudes = x.grad.abs()
    assert (found.abs_min, found.abs_max) == (float(magnitudes.min()), float(magnitudes.max()))
    kinds = [step.kind for step in kept.event.plan.steps if step.counts]
    assert len(kinds) >= 3
    assert all(step.source.file == __file__ for step in kept.event.plan.steps if step.source)


def kinds_of(tape: Tape, root: Tensor) -> list[list[str]]:
    """The operations of each run again that leads to a tensor; none if there can be none."""
    value = tape.value_of(root)
    assert value is not None
    kept = runs_of([KeptTape(tape, value, 0, 0, {0: torch.ones_like(root)})])
    return [[step.kind for step in run.event.plan.steps if step.counts] for run in kept]


@pytest.mark.parametrize("writes_first", [True, False])
def test_what_it_was_given_may_not_be_written(writes_first: bool) -> None:
    """Before it is read, a write begins anew; afterwards, nothing can run again."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if writes_first:
            x.mul_(2)
        made = (x * 1).sum()
        if not writes_first:
            x.mul_(2)
        return made

    tape, _, made = noted(loss)
    assert kinds_of(tape, made) == ([["mul", "sum"]] if writes_first else [])


def test_arguments_that_change_their_container() -> None:
    """A deep copy adds to the dict that it is given: that is not noted, and disturbs nobody."""
    leaf = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        made = leaf * 2
        copied = copy.deepcopy([leaf, leaf])
        total = made.sum()
    assert copied[0] is copied[1]
    assert kinds_of(noting.tape, total) == [["mul", "sum"]]


def test_what_nobody_can_ask_for_is_forgotten() -> None:
    """At once: operations whose results are gone, and what they were given."""
    leaf = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        kept = (leaf * 2).exp()
        for _ in range(10):
            constant = torch.ones(3)
            gone = weakref.ref(constant)
            (kept * constant).sum()
            del constant
            assert gone() is None
    assert kinds_of(noting.tape, kept) == [["mul", "exp"]]


def test_what_autograd_holds_is_held() -> None:
    """A result that the script has dropped leads to another one, also outside of what is seen."""
    leaf = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        constant = torch.ones(3)
        gone = weakref.ref(constant)
        made = (leaf + constant).exp()
    del constant
    unseen = made.sum()
    node, output = unseen.grad_fn.next_functions[0]  # type: ignore[union-attr]
    del made
    assert gone() is not None
    assert noting.tape.value_at(node, output) is not None
    del unseen, node
    assert gone() is None


@pytest.mark.parametrize("is_detached", [True, False])
def test_no_gradient_comes_to_what_requires_none(is_detached: bool) -> None:
    """Its past goes when a model returns the next time."""
    leaf = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        constant = torch.ones(3)
        gone = weakref.ref(constant)
        total = (leaf + constant).detach() if is_detached else leaf + constant
    del constant
    assert gone() is not None
    noting.tape.turn()
    assert (gone() is None) == is_detached
    assert total.isfinite().all()


@pytest.mark.parametrize("frees", [True, False])
def test_a_backward_that_freed_its_graph_frees_the_inputs(frees: bool) -> None:
    """Although the loss is still there."""
    leaf = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        constant = torch.ones(3)
        gone = weakref.ref(constant)
        loss = (leaf + constant).sum()
    del constant
    if frees:
        noting.tape.let_go([loss])
    assert (gone() is None) == frees
    assert kinds_of(noting.tape, loss) == ([] if frees else [["add", "sum"]])


def test_a_tensor_that_was_not_made_on_it() -> None:
    """Has no number."""
    tape, x, made = noted(numbers)
    assert tape.value_of(x) is None
    assert tape.value_of(torch.ones(3)) is None
    made.mul_(2)
    assert tape.value_of(made) is None
