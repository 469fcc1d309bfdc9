"""How many backwards the gradients are the sum of that a step reads, and losses of two models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.types import History
from support.needs import needs

needs("pyarrow")

STEPS, AT = 150, 120
SUMMED = "gradient SGD's step summed"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def trained(folder: Path, micro_batches: Callable[[int], int], **options: bool) -> History:
    """The history of a training that adds up the gradients of so many micro-batches."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    with fxguard.watch(model, history=folder):
        for step in range(STEPS):
            optimizer.zero_grad(**options)
            for _ in range(micro_batches(step)):
                x = torch.randn(32, 8)
                nn.functional.mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()
    return fxguard.load_history(folder)


@pytest.mark.parametrize("to_none", [True, False])
def test_more_micro_batches(to_none: bool, tmp_path: Path) -> None:
    """The loss of each is not divided by how many there are."""
    history = trained(tmp_path, lambda step: 24 if step >= AT else 2, set_to_none=to_none)
    assert set(history.get(SUMMED).high) == {2.0, 24.0}
    first = history.events[0]
    assert (first.step, first.cause, first.what) == (AT, "gradient", "all that SGD steps")
    assert first.evidence[0] == (
        f"the gradients that SGD's step reads are the sum of 24 backwards in step {AT}, and of 2 "
        "backwards in the step before"
    )
    assert "the gradient of all that SGD steps changed" in first.headline


def test_as_many_as_before(tmp_path: Path) -> None:
    """A schedule that repeats, or another count of micro-batches in the last step of an epoch."""
    history = trained(tmp_path, lambda step: 3 if step % 20 == 19 else 4)
    assert set(history.get(SUMMED).high) == {3.0, 4.0}
    assert history.events == ()


def test_gradients_that_another_loss_leaves(tmp_path: Path) -> None:
    """A critic's loss reaches the weights of the generator: nothing was detached."""
    torch.manual_seed(0)
    model, critic = mlp(), nn.Linear(1, 1)
    of_model = torch.optim.SGD(model.parameters(), lr=0.05)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    with fxguard.watch(model, history=tmp_path), fxguard.watch(critic, history=tmp_path):
        for step in range(STEPS):
            x = torch.randn(32, 8)
            made = model(x)
            nn.functional.mse_loss(made, x[:, :1]).backward()
            of_model.step()
            of_model.zero_grad()
            made = model(x) if step >= AT else made.detach()
            of_critic.zero_grad()
            (40 * critic(made).square().mean()).backward()
            of_critic.step()
    events = fxguard.load_history(tmp_path).events
    sentence = (
        f"the gradients that SGD's step reads are the sum of 2 backwards in step {AT + 1}, and of "
        "1 backward in the step before"
    )
    assert any(sentence in event.evidence for event in events), events


def test_gradients_without_elements(tmp_path: Path) -> None:
    """Sparse ones have no memory of their own, and weights may have no gradient at all."""
    torch.manual_seed(0)
    rows = nn.EmbeddingBag(20, 4, sparse=True)
    dense = torch.optim.SGD(rows.parameters(), lr=0.1)
    with fxguard.watch(rows, history=tmp_path):
        for step in range(8):
            dense.zero_grad()
            loss = rows(torch.arange(12).view(3, 4) + step).square().mean()
            if step:
                loss.backward()
            dense.step()
    history = fxguard.load_history(tmp_path)
    assert len(history.steps) == 8
    assert not history.get(SUMMED).steps


class Pair(nn.Module):
    """Two models, of which the second reads what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(1, 1)


@pytest.mark.parametrize("since", [0, AT])
def test_a_loss_of_two_models_is_in_the_history_of_both(since: int, tmp_path: Path) -> None:
    """So an operation of it that still runs is not said to run no more."""
    torch.manual_seed(0)
    pair = Pair()
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.05)

    def loss_of(step: int, x: Tensor) -> Tensor:
        made = pair.first(x)
        loss = nn.functional.mse_loss(made, x[:, :1])
        return loss + 0.01 * pair.second(made).square().mean() if step >= since else loss

    with (
        fxguard.watch(pair.first, history=tmp_path),
        fxguard.watch(pair.second, history=tmp_path),
    ):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(step, torch.randn(32, 8)).backward()
            optimizer.step()
    history = fxguard.load_history(tmp_path)
    (name,) = [name for name in history.series if name.startswith("operation mse_loss")]
    assert len(history.get(name).steps) == STEPS
    assert not any("runs no more" in line for event in history.events for line in event.evidence)
