"""Scripts with several models, or with one that is made anew: each number is of its own model."""

from __future__ import annotations

import gc
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.types import History
from support.command_line import status
from support.needs import needs

needs("pyarrow")

STEPS = 120


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = (
            nn.Linear(8, width),
            nn.LayerNorm(width),
            nn.Linear(width, 3),
        )
        self.table = nn.Embedding(50, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = self.outer(self.norm(self.inner(x) + self.table(ids)).relu())
        return found


Made = tuple[nn.Module, torch.optim.Optimizer]


def made(width: int = 32) -> Made:
    model = Net(width)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def steps(pair: Made, first: int = 0, count: int = STEPS) -> Iterator[float]:
    model, optimizer = pair
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        x, ids = (
            torch.randn(64, 8, generator=generator),
            torch.randint(50, (64,), generator=generator),
        )
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        loss = nn.functional.cross_entropy(model(x, ids), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def saved(pair: Made) -> bytes:
    file = io.BytesIO()
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, file)
    return file.getvalue()


def resumed(checkpoint: bytes, change: Callable[[dict[str, dict[str, object]]], None]) -> Made:
    kept = torch.load(io.BytesIO(checkpoint))
    change(kept)
    model, optimizer = made()
    model.load_state_dict(kept["model"], strict=False)
    optimizer.load_state_dict(kept["optimizer"])
    return model, optimizer


def two_runs(
    folder: Path, change: Callable[[dict[str, dict[str, object]]], None] = lambda kept: None
) -> History:
    """A training that goes on with another object."""
    torch.manual_seed(0)
    first = made()
    with fxguard.watch(first[0], history=folder):
        list(steps(first))
        second = resumed(saved(first), change)
        with fxguard.watch(second[0], history=folder):
            list(steps(second, STEPS))
    return fxguard.load_history(folder)


def test_another_object_of_the_same_model_goes_on(tmp_path: Path) -> None:
    history = two_runs(tmp_path)
    assert history.steps == range(2 * STEPS)
    assert (history.resumed, history.inside, history.events) == ((STEPS,), (), ())
    (loss,) = (name for name in history.series if name.startswith("loss"))
    # No loss is another object's: each step has one, the low and the high are the same.
    track = history.get(loss)
    assert track.low.tolist() == track.high.tolist()
    assert len(track) == 2 * STEPS


def leaves_out(*names: str) -> Callable[[dict[str, dict[str, object]]], None]:
    def change(kept: dict[str, dict[str, object]]) -> None:
        for name in names:
            del kept["model"][name]

    return change


def test_a_weight_that_was_not_restored(tmp_path: Path) -> None:
    (event,) = two_runs(tmp_path, leaves_out("outer.weight", "outer.bias")).events
    assert (event.step, event.cause, event.what) == (STEPS, "weights", "outer.weight")
    assert event.evidence[0] == (
        "the run was resumed in step 120, and the norms of 2 of 7 weights are not what the run "
        "before has ended with: outer.weight, outer.bias"
    )
    assert event.tried[0].startswith("in step 122, the same run once more gives ")


def test_all_weights_are_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fold of a cross-validation begins anew: a line, and no event."""
    names = [name for name, _ in Net().named_parameters()]
    history = two_runs(tmp_path, leaves_out(*names))
    assert history.events == ()
    assert "does not begin where the one before has ended" in capsys.readouterr().err


def flush(kept: dict[str, dict[str, object]]) -> None:
    """Small second moments become 0, as in a dtype of fewer numbers."""
    for state in kept["optimizer"]["state"].values():  # type: ignore[attr-defined]
        moments = state["exp_avg_sq"]
        moments[moments < moments.max() / 4] = 0


def test_elements_of_a_state(tmp_path: Path) -> None:
    (event,) = two_runs(tmp_path, flush).events
    assert (event.step, event.cause) == (STEPS, "step")
    assert event.what.startswith("the optimizer's step on ")
    assert "look at the other elements of the states" in event.evidence[1]


def test_a_jump_in_the_first_step_is_not_tried(tmp_path: Path) -> None:
    """No batch of the run is kept by then, and the text says so."""

    def change(kept: dict[str, dict[str, object]]) -> None:
        kept["model"]["outer.weight"] *= -300  # type: ignore[operator]

    (event,) = two_runs(tmp_path, change).events
    assert (event.step, event.cause, event.what) == (STEPS, "weights", "outer.weight")
    assert event.tried == ("not tried: too few batches of this run came before",)


def test_models_that_are_there_at_once_have_their_own(tmp_path: Path) -> None:
    """As those of an ensemble have, trained in turns or one after the other."""
    torch.manual_seed(0)
    pairs = [made(), made()]
    losses: list[list[float]] = [[], []]
    with (
        fxguard.watch(pairs[0][0], history=tmp_path),
        fxguard.watch(pairs[1][0], history=tmp_path),
    ):
        for both in itertools.islice(zip(*map(steps, pairs), strict=True), STEPS):
            for kept, loss in zip(losses, both, strict=True):
                kept.append(loss)
    outer = fxguard.load_history(tmp_path)
    assert outer.inside == ("Net",)
    inner = fxguard.load_history(tmp_path / "Net")
    for history, wanted in zip((outer, inner), losses, strict=True):
        (name,) = (name for name in history.series if name.startswith("loss"))
        assert history.get(name).high.tolist() == pytest.approx(wanted, rel=1e-6)
        assert not history.resumed


def test_a_model_goes_on_after_another_object_did(tmp_path: Path) -> None:
    """Then it has a folder of its own, and the steps of both are there."""
    torch.manual_seed(0)
    one = made()
    with fxguard.watch(one[0], history=tmp_path):
        list(steps(one, 0, 20))
        other = made()
        with fxguard.watch(other[0], history=tmp_path):
            list(steps(other, 0, 30))
            list(steps(one, 20, 40))
    history = fxguard.load_history(tmp_path)
    assert len(history.steps) == 50
    assert len(fxguard.load_history(tmp_path / history.inside[0]).steps) == 40


def test_another_model_has_a_folder_inside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    first, second = made(), made(16)
    with fxguard.watch(first[0], history=tmp_path), fxguard.watch(second[0], history=tmp_path):
        list(steps(first))
        for at, _ in enumerate(steps(second)):
            if at == 100:
                with torch.no_grad():
                    second[0].outer.weight.mul_(-30)  # type: ignore[operator, union-attr]
    history = fxguard.load_history(tmp_path)
    assert history.steps == range(STEPS)
    assert status("history", str(tmp_path)) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("no event in 120 steps")
    heading = printed.index(f"{tmp_path / 'Net'}:")
    assert printed[heading + 1] == (
        "step 101: outer.weight was written by something else than the optimizer"
    )


def test_a_backward_of_another_model_is_no_loss_of_this_one(tmp_path: Path) -> None:
    """The last step of a training ends only with its file; what others do by then is not its."""
    torch.manual_seed(0)
    pair = made()
    with fxguard.watch(pair[0], history=tmp_path):
        list(steps(pair, 0, 20))
        other = nn.Linear(3, 1)
        other(torch.randn(4, 3)).square().mean().mul(1e6).backward()
    history = fxguard.load_history(tmp_path)
    (name,) = (name for name in history.series if name.startswith("loss"))
    assert max(history.get(name).high) < 10


def test_two_losses_of_one_forward(tmp_path: Path) -> None:
    """The second one comes after a step of the first one's optimizer, and belongs to the step."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 4)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net["one"](x), self.net["other"](x)

    model = Both()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in net.values()]
    with fxguard.watch(model, history=tmp_path):
        for _ in range(20):
            for found, optimizer in zip(model(torch.randn(16, 8)), optimizers, strict=True):
                optimizer.zero_grad()
                found.square().mean().backward()
                optimizer.step()
    history = fxguard.load_history(tmp_path)
    assert len(history.steps) == 20
    (name,) = (name for name in history.series if name.startswith("loss"))
    track = history.get(name)
    assert all(low < high for low, high in zip(track.low, track.high, strict=True))


def test_a_model_that_is_gone(tmp_path: Path) -> None:
    """What has watched it may be there until Python collects, and hears of other optimizers."""
    torch.manual_seed(0)
    gc.disable()
    try:
        for first in (0, STEPS):
            model, optimizer = made()
            fxguard.instrument(model, history=tmp_path)
            list(steps((model, optimizer), first))
            del model, optimizer
    finally:
        gc.enable()
    gc.collect()
    assert fxguard.load_history(tmp_path).steps == range(2 * STEPS)


def test_a_stage_with_another_loss(tmp_path: Path) -> None:
    """What follows a pretraining is judged by itself: its data and its gradients are others."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(8, 16), nn.Linear(16, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    with fxguard.watch(encoder, history=tmp_path):
        for step in range(2 * STEPS):
            x = torch.randn(64, 8) * (1 if step < STEPS else 50)
            optimizer.zero_grad()
            if step < STEPS:
                (decoder(encoder(x)) - x).square().mean().backward()
            else:
                (encoder(x).sum(1) - x[:, 0].abs()).square().mean().backward()
            optimizer.step()
    assert fxguard.load_history(tmp_path).events == ()


def test_a_weight_with_more_rows(tmp_path: Path) -> None:
    """A model with a longer table goes on with the run of the one before."""

    def changed(model: nn.Module) -> None:
        table = model.table.weight.detach()  # type: ignore[union-attr,operator]
        model.table = nn.Embedding(100, 32, _weight=table.repeat(2, 1) * 9)

    torch.manual_seed(0)
    first = made()
    with fxguard.watch(first[0], history=tmp_path):
        list(steps(first))
        second, _ = resumed(saved(first), lambda kept: None)
        changed(second)
        with fxguard.watch(second, history=tmp_path):
            list(steps((second, torch.optim.Adam(second.parameters(), lr=1e-2)), STEPS))
    history = fxguard.load_history(tmp_path)
    assert (history.resumed, history.inside) == ((STEPS,), ())
    (event,) = history.events
    assert (event.step, event.cause, event.what) == (STEPS, "weights", "table.weight")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


def grown(depth: int, before: nn.Module | None = None) -> nn.Module:
    """More blocks in front of the same head, which stands elsewhere then: it begins anew."""
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(depth)], nn.Linear(8, 1))
    have = {} if before is None else before.state_dict()
    mine = model.state_dict()
    alike = {key: x for key, x in have.items() if key in mine and mine[key].shape == x.shape}
    model.load_state_dict(alike, strict=False)
    return model


def test_a_network_that_grows_goes_on(tmp_path: Path) -> None:
    """Its operations keep their names, whether a graph holds them or they run one by one."""
    torch.manual_seed(0)
    model: nn.Module | None = None
    for depth in (6, 7):
        model = fxguard.instrument(grown(depth, model), history=tmp_path)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    assert model is not None
    fxguard.remove(model)
    history = fxguard.load_history(tmp_path)
    assert (history.resumed, history.inside) == ((STEPS,), ())
    assert len(history.get("operation 0 linear").steps) == 2 * STEPS
    (event,) = [event for event in history.events if event.step == STEPS]
    new = f"the run was resumed in step {STEPS}, and 4 of 18 weights were not there before: "
    assert any(line.startswith(new) for line in event.evidence), event


def test_a_part_that_was_called_by_itself_once(tmp_path: Path) -> None:
    """As parametrizations are when they are made: it is no model whose steps are kept."""
    torch.manual_seed(0)
    model, optimizer = made()
    part = nn.Linear(32, 3)
    part.weight = model.outer.weight  # type: ignore[union-attr,assignment]
    with fxguard.watch(part, history=tmp_path), fxguard.watch(model, history=tmp_path):
        part(torch.randn(2, 32))
        list(steps((model, optimizer)))
    history = fxguard.load_history(tmp_path)
    assert (history.steps, history.resumed, history.inside) == (range(STEPS), (), ())
