"""Histories of training scripts: what is kept, that nothing changes by it, and what is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.history.recorder import Histories

Step = Callable[[int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.norm(self.inner(x * self.scale)).relu()))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def train(
    model: nn.Module,
    steps: int,
    before: Step = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """An ordinary loop."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        before(step)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kept(model: nn.Module, folder: Path) -> Any:
    fxguard.remove(model)
    return fxguard.load_history(folder)


def last(history: Any, name: str) -> float:
    return float(history.get(name).high[-1])


def test_what_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fxguard.instrument(Net(), history=tmp_path)
    losses = train(model, 5)
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1, 2, 3, 4]
    names = set(history.series)
    assert names >= {
        "input x largest",
        "targets distinct",
        "gradient inner.weight",
        "gradient inner.weight turned",
        "weight outer.bias",
        "drift norm.weight",
        "drift scale buffer",
        "step inner.weight",
        "setting learning rate of AdamW's step",
        "state exp_avg_sq of AdamW's step",
        "graph of the model",
        "time seconds",
    }
    (loss,) = [name for name in names if name.startswith("loss ")]
    assert loss.startswith("loss test_recorder.py:")
    assert history.get(loss).high == pytest.approx(losses, rel=1e-6)
    x, _ = batch(4)
    assert last(history, "input x largest") == pytest.approx(float(x.abs().max()))
    assert last(history, "setting learning rate of AdamW's step") == 3e-3
    assert last(history, "targets distinct") == len(batch(4)[1].unique())
    assert last(history, "input x number of rows") == len(x)
    assert last(history, "input x size of a row") == x[0].numel()
    (inner,) = [name for name in names if name.startswith("operation inner linear ")]
    assert history.described[inner].dtype == "float32"
    assert 0 < history.get(inner).low[0] < history.get(inner).high[0]


def test_numbers_of_weights(tmp_path: Path) -> None:
    """A gradient's norm is that which the step reads; a step is what it changed."""
    torch.manual_seed(0)
    model = fxguard.instrument(Net(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight, expected = model.get_parameter("inner.weight"), []
    step = optimizer.step

    def clipped(*args: Any, **named: Any) -> Any:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norm = float(weight.detach().norm())
        gradient = float(weight.grad.norm())  # type: ignore[union-attr]
        result = step(*args, **named)
        expected.append((norm, gradient, 0.5 * gradient / float(weight.detach().norm())))
        return result

    optimizer.step = clipped  # type: ignore[method-assign]
    train(model, 3, optimizer=optimizer)
    history = kept(model, tmp_path)
    kinds = ("weight inner.weight", "gradient inner.weight", "step inner.weight")
    found = zip(*(history.get(name).high for name in kinds), strict=True)
    assert [x for each in found for x in each] == pytest.approx(
        [x for each in expected for x in each], rel=1e-3
    )


def test_nothing_changes(tmp_path: Path) -> None:
    """Losses, weights, gradients and the random state are those without a history."""

    def run(folder: Path | None) -> tuple[list[float], list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = Net()
        if folder is not None:
            fxguard.instrument(model, history=folder)
        losses = train(model, 6)
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        return losses, [*model.state_dict().values(), *gradients], torch.get_rng_state()

    plain, guarded = run(None), run(tmp_path)
    assert plain[0] == guarded[0]
    assert all(map(torch.equal, plain[1], guarded[1]))
    assert torch.equal(plain[2], guarded[2])


def test_a_gradient_that_is_turned_after_its_backward(tmp_path: Path) -> None:
    """A clipped one is not; one with noise, or another sign, is."""
    torch.manual_seed(0)
    model = fxguard.instrument(Net(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        gradient = model.get_parameter("inner.weight").grad
        assert gradient is not None
        if step == 2:
            gradient.neg_()
        optimizer.step()
    history = kept(model, tmp_path)
    turned = history.get("gradient inner.weight turned")
    assert list(turned.steps) == [1, 2, 3]  # before the first step its optimizer is not known
    assert turned.high == pytest.approx([0, 2, 0], abs=1e-6)
    assert max(history.get("gradient outer.weight turned").high) == 0


def test_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), history=tmp_path)

    def evaluate(step: int) -> None:
        if step == 2:
            model.eval()
            with torch.no_grad():
                model(1000 * torch.ones(4, 8))
            model.train()

    train(model, 4, evaluate)
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1, 2, 3]
    assert max(history.get("input x largest").high) < 10


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1]
    largest = [float(batch(step)[0].abs().max()) for step in range(8)]
    seen = history.get("input x largest")
    assert seen.high == pytest.approx([max(largest[:4]), max(largest[4:])])
    assert seen.low == pytest.approx([min(largest[:4]), min(largest[4:])])


def test_two_optimizers_of_one_model_make_one_step(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), history=tmp_path)
    both = [
        torch.optim.SGD(model.get_submodule("inner").parameters(), lr=0.1),
        torch.optim.AdamW(model.get_submodule("outer").parameters(), lr=0.01),
    ]
    for step in range(3):
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1, 2]
    assert last(history, "setting learning rate of SGD's step") == 0.1
    assert last(history, "setting learning rate of AdamW's step") == 0.01


def test_without_an_optimizer_a_call_is_a_step(tmp_path: Path) -> None:
    """Until it is clear that there is none, calls wait for one."""
    model = fxguard.instrument(Net(), history=tmp_path)
    for step in range(40):
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad  # type: ignore[operator]
                weight.grad = None
    history = kept(model, tmp_path)
    assert len(history.steps) > 20


def test_a_scaled_loss_is_told_before_its_scale(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    losses = []
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    history = kept(model, tmp_path)
    (name,) = [name for name in history.series if name.startswith("loss ")]
    assert history.get(name).high == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("how", ["instrument", "watch"])
def test_an_event_is_told_when_it_happens(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Net()

    def overwrite(step: int) -> None:
        if step == 100:
            with torch.no_grad():
                model.get_parameter("outer.weight").mul_(-6)

    if how == "instrument":
        fxguard.instrument(model, history=tmp_path)
        train(model, 120, overwrite)
        fxguard.remove(model)
    else:
        with fxguard.watch(model, history=tmp_path):
            train(model, 120, overwrite)
    history = fxguard.load_history(tmp_path)
    (event,) = history.events
    assert (event.step, event.cause, event.what) == (100, "weights", "outer.weight")
    said = capsys.readouterr().err.splitlines()
    headline = "fxguard: step 100: outer.weight was written by something else than the optimizer"
    assert said[0] == headline
    assert said[1].startswith("fxguard:   outer.weight is 6 times as large")


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"act": torch.exp}, "exp", "exp runs where relu did"),
        ({"factor": 9.0}, "mul", "mul is given another number in place of 1.0"),
        ({"shifts": True}, "add", "add runs now"),
    ],
    ids=["activation", "factor", "one more"],
)
def test_an_operation_that_changes_is_named_with_what_changed(
    changes: dict[str, Any], what: str, said: str, tmp_path: Path
) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 1)
            self.act: Any = torch.relu
            self.factor, self.shifts = 1.0, False

        def forward(self, x: Tensor) -> Tensor:
            made = self.outer(self.act(self.inner(x))) * self.factor
            return made + 5 if self.shifts else made

    torch.manual_seed(0)
    model = fxguard.instrument(Changes(), history=tmp_path)

    def change(step: int) -> None:
        for name, value in changes.items() if step == 110 else ():
            setattr(model, name, value)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        change(step)
        x, _ = batch(step)
        optimizer.zero_grad()
        (model(x) - x[:, :1].abs()).square().mean().backward()
        optimizer.step()
    (event,) = kept(model, tmp_path).events
    assert (event.step, event.cause, event.what) == (110, "operation", what)
    assert event.evidence[0] == said


def test_autocast_that_begins_is_named_by_the_first_operation_that_it_changes(
    tmp_path: Path,
) -> None:
    """No constant and no operation is another one: only the dtype of what they make."""

    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rate", torch.tensor([[6.283 / 1440, 6.283 / 480]]))
            self.out = nn.Linear(4, 1)

        def forward(self, minute: Tensor) -> Tensor:
            phase = minute @ self.rate
            made: Tensor = self.out(torch.cat([phase.sin(), phase.cos()], 1))
            return made

    torch.manual_seed(0)
    model = fxguard.instrument(Phases(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(126):
        minute = torch.randint(
            40_000, (64, 1), generator=torch.Generator().manual_seed(step)
        ).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=step >= 120):
            found = model(minute)
        optimizer.zero_grad()
        (found.float() - (minute * 6.283 / 480).sin()).square().mean().backward()
        optimizer.step()
    (event,) = kept(model, tmp_path).events
    assert (event.step, event.cause, event.what) == (120, "operation", "matmul")
    assert event.evidence[0] == "matmul makes bfloat16 in place of float32"


def test_a_model_that_is_frozen_makes_no_steps(tmp_path: Path) -> None:
    """While only a head behind it is trained: its calls are no part of a later step."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)
    with fxguard.watch(body, history=tmp_path):
        for phase, steps in enumerate((10, 30, 10)):
            body.requires_grad_(phase != 1)
            weights = [x for x in (*body.parameters(), *head.parameters()) if x.requires_grad]
            optimizer = torch.optim.SGD(weights, lr=0.1)
            for step in range(steps):
                x, y = (part[: 16 if phase == 1 else 32] for part in batch(step))
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(body(x)), y).backward()
                optimizer.step()
    history = fxguard.load_history(tmp_path)
    assert list(history.steps) == list(range(20))
    rows = history.get("input number of rows")
    assert {*rows.low, *rows.high} == {32.0}


def test_a_model_that_is_never_trained_has_none(tmp_path: Path) -> None:
    model = fxguard.instrument(Net().eval(), history=tmp_path / "none")
    with torch.no_grad():
        model(torch.randn(4, 8))
    fxguard.remove(model)
    assert not (tmp_path / "none").exists()


def test_a_second_model_has_a_folder_inside(tmp_path: Path) -> None:
    first, second = Net(), nn.Sequential(nn.Linear(8, 3))
    for model in (first, second):
        fxguard.instrument(model, history=tmp_path)
    train(first, 2)
    train(second, 3)
    assert len(kept(first, tmp_path).steps) == 2
    assert len(kept(second, tmp_path / "Sequential").steps) == 3


def test_models_of_one_class_have_a_folder_each_at_a_time(tmp_path: Path) -> None:
    first, second, third = (fxguard.instrument(Net(), history=tmp_path) for _ in range(3))
    for model in (first, second, third):
        train(model, 2)
    for model in (first, second, third):
        fxguard.remove(model)
    for folder in (tmp_path, tmp_path / "Net", tmp_path / "Net 2"):
        assert list(fxguard.load_history(folder).steps) == [0, 1]


def test_a_model_that_is_gone_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    train(fxguard.instrument(Net(), history=tmp_path), 3)
    gc.collect()
    model = fxguard.instrument(Net(), history=tmp_path)
    train(model, 2)
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1, 2, 3, 4]


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    for steps in (3, 2):
        model = fxguard.instrument(Net(), history=tmp_path)
        train(model, steps)
        fxguard.remove(model)
    history = fxguard.load_history(tmp_path)
    assert list(history.steps) == [0, 1, 2, 3, 4]
    assert len(history.runs) == 2


def test_a_step_with_nan_is_kept_as_such(tmp_path: Path) -> None:
    """It is an event where it lasts, and what is usual stays as it was."""
    torch.manual_seed(0)
    model = fxguard.instrument(Net(), history=tmp_path, on_detect=lambda report: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(120):
        x, y = batch(step)
        if step in (20, 90):
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        model.eval()  # no statistics of a NaN
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad.nan_to_num_(0.0)
        optimizer.step()
    history = kept(model, tmp_path)
    (loss_name,) = [name for name in history.series if name.startswith("loss ")]
    (inner,) = [name for name in history.series if name.startswith("operation inner linear ")]
    for name in (loss_name, inner, "input x largest"):
        track = history.get(name)
        assert list(track.steps) == list(range(120))
        assert [step for step in range(120) if track.high[step] == torch.inf] == [20, 90]
        assert [step for step in range(120) if track.low[step] != track.low[step]] == [20, 90]
    (event,) = history.events
    assert (event.step, event.cause, event.what) == (90, "data", "input x")
    assert "to inf or NaN in step 90" in event.evidence[0]


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 2, optimizer=optimizer)
    history = fxguard.guard_of(model).recorder.listener(Histories)  # type: ignore[attr-defined]
    assert history is not None
    assert len(history._optimizers._known) == 1
    del optimizer
    gc.collect()
    assert not len(history._optimizers._known)
    fxguard.remove(model)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_without_pyarrow_it_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(fxguard.FxguardError, match=r"pip install 'fxguard\[history\]'"):
        fxguard.instrument(Net(), history=tmp_path)


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    x = torch.randn(32, 8)
    if step == 90:
        for group in optimizer.param_groups:
            group["lr"] *= 60
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script(tmp_path: Path) -> None:
    """``fxguard run --history``, to the end of the process."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "fxguard", "run", "--history", "kept", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "step 90: learning rate of SGD's step changed" in done.stderr, done.stderr
    history = fxguard.load_history(tmp_path / "kept")
    assert history.events[0].what == "learning rate of SGD's step"
    (loss,) = [name for name in history.series if name.startswith("loss ")]
    assert loss == "loss train.py:15"
    assert any(name.startswith("operation mean train.py:13") for name in history.series)


def test_a_compiled_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fxguard.instrument(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), history=tmp_path)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        compiled(batch(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    history = kept(model, tmp_path)
    assert list(history.steps) == [0, 1, 2]
    assert any(name.startswith("operation 0 linear") for name in history.series)


@pytest.mark.parametrize("of_each", [False, True])
def test_a_model_that_is_called_in_transforms(tmp_path: Path, of_each: bool) -> None:
    """Levels of torch.func reach into no row, and what they wrap has no memory of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(model, weights, (x,))
        return made.square().mean()

    def gradients(x: Tensor) -> Tensor:
        gradient = torch.func.grad(loss)
        if of_each:
            gradient = torch.func.vmap(gradient, (None, 0))
            x = x[:, None]
        made: Tensor = gradient(weights, x)["0.weight"]
        return made

    batches = [torch.randn(6, 4) for _ in range(20)]
    plain = [gradients(x) for x in batches]
    fxguard.instrument(model, history=tmp_path)
    found = [gradients(x) for x in batches]
    fxguard.remove(model)
    assert all(map(torch.equal, plain, found))
    history = fxguard.load_history(tmp_path)
    assert history.steps == range(20)
    assert "operation 0 linear" in history.series


class InParts(nn.Module):
    """Two graphs, with operations of one name on one line in both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.scale = 1.0

    @torch.compiler.disable
    def apart(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.apart(torch.relu(self.first(x)))) * self.scale)


def test_operations_of_one_line_in_two_graphs(tmp_path: Path) -> None:
    """Each has a series; what nobody has written yet has none."""
    torch.manual_seed(0)
    model = InParts()
    fxguard.instrument(model, history=tmp_path)
    for _ in range(20):  # without an optimizer, calls are steps after a while
        model(torch.randn(6, 4)).sum().backward()
    fxguard.remove(model)
    names = [name for name in fxguard.load_history(tmp_path).series if name.startswith("operation")]
    (first,) = [name for name in names if " relu " in name and "#" not in name]
    assert names.index(f"{first} #2") > names.index(first) + 1
    assert not any("empty_like" in name for name in names)
