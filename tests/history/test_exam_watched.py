"""The exam of `fxguard.history` as users meet it: `fxguard.watch` keeps the history, and reruns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

import fxguard
from fxguard.types import Event
from history.exam.chosen import healthy, planted
from history.exam.healthy import Healthy
from history.exam.planted import Planted
from history.exam.training import Started

PLANTED_SAMPLE = {"mlp-dropout-of-nearly-all", "mlp-momentum-turned"}
HEALTHY_SAMPLE = {"mlp-epochs": 150}


def watched(folder: Path, train: Callable[[Started], object]) -> tuple[list[Event], object]:
    """The events of a training, and what it returns."""
    with ExitStack() as stack:

        def started(model: nn.Module, optimizer: Optimizer) -> None:
            stack.enter_context(fxguard.watch(model, history=folder))

        made = train(started)
    folders = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    return [event for each in folders for event in fxguard.load_history(each).events], made


@planted(PLANTED_SAMPLE)
def test_a_planted_cause_is_named(tmp_path: Path, run: Planted) -> None:
    """Its kind, its name and its step; what is tried changes nothing of the training."""
    (first, *_), losses = watched(tmp_path, run.train)
    assert run.is_named_by(first), first
    assert losses == run.train(lambda *pair: None)


@healthy(HEALTHY_SAMPLE)
def test_a_healthy_run_has_no_events(tmp_path: Path, run: Healthy, steps: int) -> None:
    found, losses = watched(tmp_path, lambda started: run.train(started, steps))
    assert found == []
    assert losses == run.train(lambda *pair: None, steps)
