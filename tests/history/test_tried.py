"""A batch whose loss jumps is run again: what that says of its cause, and that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.history import _kept_batches, _trials
from fxguard.history._kept_batches import KeptBatches
from fxguard.history._trials import Before, Trial
from fxguard.report.event import Event

JUMP = 140  # the step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.dropout, self.gain = nn.Dropout(0.1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.outer(self.dropout(self.norm(self.inner(x)).relu()))
        return made * self.gain


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :1] + 0.3 * torch.randn(16, 1, generator=generator)


def train(
    model: nn.Module,
    *,
    at: Callable[[nn.Module, Tensor, Tensor], object] = lambda model, x, y: None,
    loss_of: Callable[[Tensor, Tensor, bool], Tensor] = lambda found, y, jumps: (
        nn.functional.mse_loss(found, y)
    ),
    rows: Callable[[int], int] = lambda step: 16,
) -> Iterator[float]:
    """An ordinary loop, in which something happens in one step; yields the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for step in range(JUMP + 3):
        x, y = batch(step)
        x, y = x[: rows(step)], y[: rows(step)]
        if step == JUMP:
            at(model, x, y)
        optimizer.zero_grad()
        loss = model(x, y) if isinstance(model, WithLoss) else loss_of(model(x), y, step == JUMP)
        loss.backward()
        optimizer.step()
        yield loss.item()


def first_event(folder: Path, history_weights: bool = False, **keywords: object) -> Event:
    torch.manual_seed(0)
    model = Net()
    with fxguard.watch(model, history=folder, history_weights=history_weights):
        list(train(model, **keywords))  # type: ignore[arg-type]
    event: Event = fxguard.load_history(folder).events[0]
    return event


def one_far_target(model: nn.Module, x: Tensor, y: Tensor) -> None:
    y[11] = 60.0


def all_far_targets(model: nn.Module, x: Tensor, y: Tensor) -> None:
    y *= 40.0


def other_weights(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        model.outer.weight.mul_(-30)  # type: ignore[operator, union-attr]


def other_gain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.gain = 12.0  # type: ignore[assignment]


def test_one_sample_is_named(tmp_path: Path) -> None:
    event = first_event(tmp_path, at=one_far_target)
    assert (event.step, event.cause) == (JUMP, "data")
    batch, same = event.tried
    assert batch.startswith("the batch: with these weights the batch before gives 0.")
    assert ", with another sample in the place of sample 11 this one gives 0." in batch
    assert same.startswith("the same run once more gives ")
    assert same.endswith(" again")


def test_no_sample_is_named_where_all_are_alike(tmp_path: Path) -> None:
    event = first_event(tmp_path, at=all_far_targets)
    assert event.cause == "data"
    assert "the batch before gives 0." in event.tried[0]
    assert "sample" not in event.tried[0]


def named(value: object) -> str:
    """The same in each process that collects."""
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(
    ("at", "cause"), [(other_weights, "weights"), (other_gain, "operation")], ids=named
)
def test_the_batch_before_has_the_same_loss(
    tmp_path: Path, at: Callable[..., None], cause: str
) -> None:
    event = first_event(tmp_path, at=at)
    assert (event.step, event.cause) == (JUMP, cause)
    assert event.tried[0].endswith(", too")


def test_a_loss_of_another_form_is_no_matter_of_the_data(tmp_path: Path) -> None:
    def loss_of(found: Tensor, y: Tensor, jumps: bool) -> Tensor:
        return nn.functional.mse_loss(
            20 * found if jumps else found, y, reduction="sum" if jumps else "mean"
        )

    event = first_event(tmp_path, loss_of=loss_of)
    assert (event.step, event.cause) == (JUMP, "operation")
    assert "mse_loss" in event.what
    assert event.tried[0].endswith(", too")


def test_another_function_of_the_loss_is_its_code(tmp_path: Path) -> None:
    """Operations of another line run where others did: whatever they read is as it was."""

    def loss_of(found: Tensor, y: Tensor, jumps: bool) -> Tensor:
        error = found - y
        if not jumps:
            return (error / 2).square().mean()
        doubled = 9 * error
        return doubled.square().mean()

    event = first_event(tmp_path, loss_of=loss_of)
    assert (event.step, event.cause, event.what) == (JUMP, "operation", "mul")
    went, came, *_ = event.evidence
    assert went.startswith("div (test_tried.py:")  # it may run in another line
    assert went.endswith(f") has run in each step, and runs no more in step {JUMP}")
    assert came.startswith(f"mul runs for the first time in step {JUMP}: it makes ")


class Quantized(nn.Module):
    """The nearest entries of a codebook: looked up without gradients, and read by another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 1)
        self.codebook: Tensor
        self.register_buffer("codebook", torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        found = self.codebook[torch.cdist(z, self.codebook).argmin(1)]
        if found.sum().item() > 1e9:
            raise ValueError("not a codebook")
        made: Tensor = self.outer(z + (found - z).detach())
        return made


def test_what_a_model_has_looked_up_is_no_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Quantized()
    with fxguard.watch(model, history=tmp_path):
        list(train(model, at=lambda model, x, y: model.codebook.mul_(30)))  # type: ignore[operator,union-attr]
    event = fxguard.load_history(tmp_path).events[0]
    assert (event.step, event.cause, event.what) == (JUMP, "weights", "codebook")
    assert event.tried == ("not tried: the model computes a part of it without gradients",)


class Normed(nn.Module):
    """Divides by a running deviation, which each forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 1)
        self.deviation: Tensor
        self.register_buffer("deviation", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        self.deviation.lerp_(found.detach().std(0), 0.1)
        made: Tensor = self.outer((found / self.deviation).relu())
        return made


def test_a_buffer_that_each_forward_updates_is_written_by_something_else(tmp_path: Path) -> None:
    """It was written before the forward began, whatever the forward makes of it."""
    torch.manual_seed(0)
    with fxguard.watch(model := Normed(), history=tmp_path):
        list(train(model, at=lambda model, x, y: model.deviation.fill_(0.01)))  # type: ignore[operator,union-attr]
    event = fxguard.load_history(tmp_path).events[0]
    assert (event.step, event.cause, event.what) == (JUMP, "weights", "deviation")


def test_a_number_that_no_second_run_makes_is_the_machines(tmp_path: Path) -> None:
    def loss_of(found: Tensor, y: Tensor, jumps: bool) -> Tensor:
        if jumps:
            found.detach().numpy()[3] = 300.0  # which counts no version, as a flipped bit does not
        return nn.functional.mse_loss(found, y)

    event = first_event(tmp_path, loss_of=loss_of)
    assert (event.step, event.cause) == (JUMP, "machine")
    (same,) = event.tried
    assert same.startswith("the same run once more gives 0.")
    assert ", not " in same


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (other_weights, f"with those of step {JUMP - 1} this batch gives 0."),
        (one_far_target, f"with those of step {JUMP - 4} this batch gives 2"),
    ],
    ids=named,
)
def test_weights_of_earlier_steps(tmp_path: Path, at: Callable[..., None], found: str) -> None:
    """The last ones with which the loss is usual are named; if none is, the oldest."""
    event = first_event(tmp_path, history_weights=True, at=at)
    (text,) = [one for one in event.tried if one.startswith("the weights: ")]
    assert found in text
    assert text.endswith(", too") == (at is one_far_target)


def test_weights_are_of_a_history() -> None:
    with pytest.raises(fxguard.FxguardError, match="give history too"):
        fxguard.instrument(Net(), history_weights=True)


def test_a_model_that_returns_its_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fxguard.instrument(WithLoss(), history=tmp_path)
    list(train(model, at=one_far_target))
    fxguard.remove(model)
    (event,) = fxguard.load_history(tmp_path).events
    assert "in the place of sample 11" in event.tried[0]


@pytest.mark.parametrize("at", [one_far_target, other_weights, other_gain])
def test_the_training_is_that_of_a_model_without_a_history(
    tmp_path: Path, at: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    plain = list(train(Net(), at=at))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    with fxguard.watch(model := Net(), history=tmp_path):
        assert list(train(model, at=at)) == plain
    assert torch.rand(1) == drawn
    assert fxguard.load_history(tmp_path).events[0].tried[0].startswith("the batch: ")


def test_what_was_not_tried_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = fxguard.instrument(Net(), history=tmp_path / "a")
    list(train(model, at=one_far_target))
    fxguard.remove(model)
    (event,) = fxguard.load_history(tmp_path / "a").events
    (said,) = event.tried
    assert said.startswith("not tried: MseLossBackward0 is made outside the model")
    event = first_event(tmp_path / "b", at=one_far_target, rows=lambda step: 16 - step % 6)
    assert event.tried[0] == "not tried: the batches before had other shapes"
    monkeypatch.setattr(_kept_batches, "MOST_BYTES", 100)
    event = first_event(tmp_path / "c", at=one_far_target)
    assert event.tried[0] == "not tried: a batch takes more than 64 MB"
    monkeypatch.undo()
    monkeypatch.setattr(_trials, "LONGEST", 0.0)
    event = first_event(tmp_path / "d", at=one_far_target)
    assert event.tried[0] == "not tried: second runs of it take too long"


def test_copies_take_the_memory_that_is_allowed() -> None:
    kept = KeptBatches()
    batches = [torch.zeros(2**22) for _ in range(5)]  # 16 MB each
    for step, each in enumerate(batches):
        kept.keep(step % 2, step, 1.0, [each])
    found = [each.step for series in (0, 1) for each in kept.before(series, [batches[0]])]
    assert sorted(found) == [1, 2, 3, 4]  # 64 MB
    for step in range(5, 15):
        kept.keep(0, step, 1.0, [batches[0]])  # one copy serves all
    assert [each.step for each in kept.before(0, [batches[0]])] == [14, 13, 12, 11]
    batches[0].numpy()[0] = 1.0
    kept.keep(0, 15, 1.0, [batches[0]])
    newest, before = (each.data[0] for each in [*kept.before(0, [batches[0]])][:2])
    assert newest[0] == 1.0
    assert before[0] == 0.0


OF_TRIALS = {  # batches before step 10: whether the data are shown to make the jump, since when
    "one foreign batch": ([Before(9, 2.1, 2.0), Before(8, 2.0, 2.1)], True, 10),
    "the second one": ([Before(9, 3.3, 3.27), Before(8, 2.1, 2.0)], True, 9),
    "the third one": ([Before(9, 3.3, 3.2), Before(8, 3.4, 3.3), Before(7, 2.1, 2.0)], True, 8),
    "other weights": ([Before(9, 2.1, 3.4), Before(8, 2.0, 3.3)], False, 10),
    "other weights for two steps": ([Before(9, 3.3, 3.4), Before(8, 2.0, 3.3)], False, 9),
    "unusual for long": ([Before(9, 3.3, 3.3), Before(8, 3.4, 3.4)], None, 10),
    "nothing": ([], None, 10),
}


@pytest.mark.parametrize("name", OF_TRIALS)
def test_batches_that_were_as_unusual_say_nothing_of_the_weights(name: str) -> None:
    before, shows_data, since = OF_TRIALS[name]
    trial = Trial(10, usual=2.0, loss=3.5, again=3.5, before=tuple(before))
    assert trial.shows_data(10) is shows_data
    assert not shows_data or trial.changed_at(10) == since


def test_a_second_jump_that_is_much_higher_is_tried_at_once(tmp_path: Path) -> None:
    """The first is none, and its second runs are a few steps old."""

    def loss_of(found: Tensor, y: Tensor, jumps: bool) -> Tensor:
        nonlocal calls
        calls += 1
        loss = nn.functional.mse_loss(found, y + 40 if calls == JUMP else y)
        return loss * 1.8 if calls == JUMP - 4 else loss

    calls = 0
    with fxguard.watch(model := Net(), history=tmp_path):
        list(train(model, loss_of=loss_of))
    (event,) = fxguard.load_history(tmp_path).events
    assert (event.step, event.cause) == (JUMP - 1, "data")
    assert any("the batch before gives" in each for each in event.tried)
