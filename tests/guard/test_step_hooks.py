"""Hooks on steps may go while a step runs: the collector frees a guard, a callback removes one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn

import fxguard
from fxguard.steps.step_hooks import StepHooks


class Counts:
    """Counts steps, with hooks that live as long as it does."""

    def __init__(self) -> None:
        self.before = self.after = 0
        self.hooks = StepHooks(self.see_before, self.see_after)

    def see_before(self, *_: Any) -> None:
        self.before += 1

    def see_after(self, *_: Any) -> None:
        self.after += 1


def let_go(held: list[Counts]) -> None:
    held.clear()
    gc.collect()


def close(held: list[Counts]) -> None:
    held[0].hooks.close()


def make(held: list[Counts]) -> None:
    held.append(Counts())


@pytest.mark.parametrize("change", [let_go, close])
@pytest.mark.parametrize("register", ["pre", "post"])
def test_hooks_may_go_while_a_step_runs(
    change: Callable[[list[Counts]], None], register: str
) -> None:
    """The step goes on, and the hooks are gone when the next ones come."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], 0.1)
    gc.collect()  # hooks of other tests' guards go
    known = {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks}
    held = [Counts()]
    others = Counts()
    add = getattr(optimizers, f"register_optimizer_step_{register}_hook")
    # Before the hooks that go, and behind the first of them.
    handle = add(lambda *_: change(held))
    last = Counts()
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert torch.equal(weight.detach(), torch.full((2,), 0.9))
    assert (others.before, others.after, last.before, last.after) == (1, 1, 1, 1)
    others.hooks.close()
    last.hooks.close()
    held.clear()
    now = {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks}
    assert now == known


def test_a_guarded_model_may_go_while_a_step_runs() -> None:
    """Its guard has hooks of its own, which tell whether weights were written."""
    model, known = fxguard.instrument(nn.Linear(3, 2)), len(optimizers._global_optimizer_post_hooks)
    model(torch.ones(2, 3))
    assert len(optimizers._global_optimizer_post_hooks) == known + 1
    held, weight = [model], nn.Parameter(torch.ones(2))
    del model
    weight.grad = torch.ones(2)
    handle = optimizers.register_optimizer_step_post_hook(lambda *_: (held.clear(), gc.collect()))
    try:
        torch.optim.SGD([weight], 0.1).step()
    finally:
        handle.remove()
    assert torch.equal(weight.detach(), torch.full((2,), 0.9))


def test_a_guard_may_be_dropped_by_the_callback_of_another() -> None:
    """As a script does that stops looking once something was found."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), float("inf"))
    watches = [fxguard.watch(other, on_detect=lambda report: None)]
    watches[0].__enter__()
    found: list[fxguard.types.Report] = []

    def stop(report: fxguard.types.Report) -> None:
        found.append(report)
        watches.pop().__exit__(None, None, None)

    with fxguard.watch(model, on_detect=stop):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert [report.phase for report in found] == ["optimizer"]
