"""What a loss reads beside the outputs of the model: tensors of the script, and plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.report.event import Event

JUMP = 140  # the step
WEIGHTS = torch.tensor([0.8, 1.2, 1.0])


def weighted(outputs: Tensor, y: Tensor, jumps: bool) -> Tensor:
    w = torch.rand(len(outputs), 1) + 0.5
    if jumps:
        w = w * 40
    return (w * (outputs - y) ** 2).mean()


def of_classes(outputs: Tensor, y: Tensor, jumps: bool) -> Tensor:
    label = (y[:, 0] > 0).long() + 1
    weight = WEIGHTS * (30 if jumps else 1)
    each = nn.functional.cross_entropy(outputs, label, weight=weight, reduction="none")
    return each.mean()


def scheduled(outputs: Tensor, y: Tensor, jumps: bool) -> Tensor:
    beta = 9.0 if jumps else 0.1
    return ((outputs - y) ** 2).mean() + beta * outputs.abs().mean()


def divided(outputs: Tensor, y: Tensor, jumps: bool) -> Tensor:
    temperature = 0.02 if jumps else 1.0
    label = (y[:, 0] > 0).long()
    return nn.functional.cross_entropy(outputs / temperature, label)


def train(folder: Path, loss_of: Callable[[Tensor, Tensor, bool], Tensor]) -> list[Event]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    with fxguard.watch(model, history=folder):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(JUMP + 3):
            x = torch.randn(16, 8)
            y = x[:, :1] + 0.3 * torch.randn(16, 1)
            loss = loss_of(model(x), y, step >= JUMP)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return list(fxguard.load_history(folder).events)


@pytest.mark.parametrize(
    ("loss_of", "what", "said"),
    [
        (weighted, "w", "the largest of w goes from 1.4"),
        (of_classes, "weight of cross_entropy", "goes from 1.2 to 36 in step 140"),
    ],
)
def test_a_tensor_of_the_script_is_to_blame(
    tmp_path: Path, loss_of: Callable[..., Tensor], what: str, said: str
) -> None:
    (event,) = train(tmp_path, loss_of)
    assert (event.step, event.cause, event.what) == (JUMP, "data", what)
    assert event.source.startswith("test_read_by_loss.py:")
    assert said in event.evidence[0]
    assert any("the batch before gives 0." in each for each in event.tried)


@pytest.mark.parametrize(
    ("loss_of", "what", "said"),
    [
        (scheduled, "mul", "the number that mul reads goes from 0.1 to 9 in step 140"),
        (divided, "div", "the number that div reads goes from 1 to 0.02 in step 140"),
    ],
)
def test_a_plain_number_is_told_with_its_operation(
    tmp_path: Path, loss_of: Callable[..., Tensor], what: str, said: str
) -> None:
    (event,) = train(tmp_path, loss_of)
    assert (event.step, event.cause, event.what) == (JUMP, "operation", what)
    assert event.source.startswith("test_read_by_loss.py:")
    assert event.evidence[0] == said


def test_what_is_kept_of_them(tmp_path: Path) -> None:
    train(tmp_path, weighted)
    history = fxguard.load_history(tmp_path)
    names = [name.rpartition(":")[0] for name in history.series if name.endswith(" mean")]
    assert names[1:] == ["target y test_read_by_loss.py", "target w test_read_by_loss.py"]
    (power,) = [name for name in history.series if name.startswith("number ")]
    track = history.get(power)
    assert set(track.high) == set(track.low) == {2.0}


def test_a_number_that_moves_slowly_is_none(tmp_path: Path) -> None:
    beta = 0.0

    def annealed(outputs: Tensor, y: Tensor, jumps: bool) -> Tensor:
        nonlocal beta
        beta += 0.01
        return ((outputs - y) ** 2).mean() + beta * outputs.abs().mean()

    assert train(tmp_path, annealed) == []
