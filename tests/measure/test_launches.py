"""What checks would launch on a GPU, counted on a CPU: little more than the model alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fxguard
from fxguard.measure import gpu
from support.launches import READING, kernels_of, launched_by_checks
from support.zoo import TRANSFORMERS, ZOO, loss_of

pytestmark = pytest.mark.slow

TRAINING, EVALUATION = 1.1, 1.3
WARM = 24  # calls, after which a model whose graphs are felt is captured whole

IN_CI = ("gpt2", "resnet")
MODELS = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_CI else pytest.mark.campaign)
        for name in TRANSFORMERS
    ],
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    # Preparing rows, once for 1,024, is no part of a step.
    monkeypatch.setattr(gpu, "ROWS", 2**16)
    monkeypatch.setattr(gpu, "_local", threading.local())
    yield
    torch._dynamo.reset()


def step_of(name: str, *, trains: bool, guarded: bool) -> Callable[[], Any]:
    """One step of a model: a forward, or a forward, a backward and an update in few launches."""
    model = ZOO[name].model(train=trains)
    args, named = ZOO[name].inputs(torch.float32, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if guarded:
        fxguard.instrument(model)

    def evaluate() -> Any:
        with torch.no_grad():
            return model(*args, **named)

    def train() -> None:
        optimizer.zero_grad()
        loss_of(model(*args, **named)).backward()
        optimizer.step()

    return train if trains else evaluate


def kernels(name: str, *, trains: bool, guarded: bool) -> Counter[str]:
    step = step_of(name, trains=trains, guarded=guarded)
    for _ in range(WARM if guarded else 2):
        step()
    return kernels_of(step)


@MODELS
@pytest.mark.parametrize(("trains", "aim"), [(True, TRAINING), (False, EVALUATION)])
def test_checks_launch_few_kernels(name: str, trains: bool, aim: float) -> None:
    """Nearly all that they launch are readings, and each reads many values."""
    plain = kernels(name, trains=trains, guarded=False)
    with launched_by_checks():
        checked = kernels(name, trains=trains, guarded=True)
    assert checked[READING]
    assert checked.total() <= aim * plain.total(), checked - plain
    assert not plain - checked, "nothing of the model itself has changed"
