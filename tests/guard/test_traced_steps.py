"""Traces of whole steps: forward, loss and backward, written when the backward has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxguard
from fxguard.integrations.tensorboard import log_trace
from fxguard.records import Frame


class Net(nn.Module):
    """Two layers; the loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def traced(folder: Path, backend: str | None = None, steps: int = 3) -> fxguard.types.Trace:
    """A training of some steps, of which the second and the third are traced."""
    model, (x, target) = Net(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    run = torch.compile(model, backend=backend) if backend else model
    with fxguard.watch(model, trace_to=folder, trace_batch_nums=[1, 2]):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(run(x), target).backward()
            optimizer.step()
    (path,) = folder.iterdir()
    return fxguard.load_trace(path)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def of(frames: tuple[Frame, ...], phase: str) -> list[str]:
    return [frame.title for frame in frames if frame.phase == phase]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_one_timeline_of_a_step(tmp_path: Path, backend: str | None) -> None:
    """Forward, loss, the backward in its own order, and the step, with their numbers."""
    trace = traced(tmp_path, backend)
    assert [batch.number for batch in trace.batches] == [1, 2]
    for batch in trace.batches:
        phases = [frame.phase for frame in batch.frames]
        assert phases == sorted(phases, key=["forward", "loss", "backward", "optimizer"].index)
        assert of(batch.frames, "loss") == ["cross_entropy"]
        assert of(batch.frames, "backward") == [
            "cross_entropy (backward)",
            "b linear (backward)",
            "tanh (backward)",
            "a linear (backward)",
        ]
        weights = ("a.weight", "a.bias", "b.weight", "b.bias")
        assert of(batch.frames, "optimizer") == [f"{weight} SGD" for weight in weights]
        lines = {f.source.code for f in batch.frames if f.phase == "optimizer" and f.source}
        assert lines == {"optimizer.step()"}
    model, (x, target) = Net(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
        if not number:
            continue
        frames = {(f.phase, f.name): f for f in trace.batches[number - 1].frames}
        assert model.a.weight.grad is not None
        gradient, weight = largest(model.a.weight.grad), largest(model.a.weight)
        moment = largest(optimizer.state[model.a.weight]["momentum_buffer"])
        rows = {row.label: row for row in frames["backward", "a"].rows}
        assert rows["grad of weight"].abs_max == pytest.approx(gradient, rel=1e-5)
        assert rows["grad of weight"].dtype == "float32"
        found = [(row.label, row.abs_max) for row in frames["optimizer", "a.weight"].rows]
        assert [label for label, _ in found] == ["grad", "momentum_buffer", "output"]
        assert [number for _, number in found] == pytest.approx(
            [gradient, moment, weight], rel=1e-5
        )


def test_a_trace_holds_what_was_written(tmp_path: Path) -> None:
    """Phases and titles, and a page with all of them."""
    trace = traced(tmp_path)
    trace.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "linear (backward)" in page
    assert "linear (backward) (backward)" not in page
    root = trace.batches[0].root
    assert root is not None
    assert root.kind == "Net"
    assert trace.is_healthy


def test_gradients_of_two_batches_are_compared(tmp_path: Path) -> None:
    """Each frame with its own: forward with forward, backward with backward."""
    batches = traced(tmp_path).batches
    compared = fxguard.diff(batches[0], batches[1])
    matches = compared.batches[0].matches
    assert all(m.a and m.b and m.a.title == m.b.title and m.a.phase == m.b.phase for m in matches)
    assert any(m.differs for m in matches if m.frame.phase == "backward")
    assert not any(m.differs for m in fxguard.diff(batches[0], batches[0]).batches[0].matches)


def test_tensorboard_has_a_chart_of_each_gradient(tmp_path: Path) -> None:
    """Forward and backward of one operation are two charts."""
    tags: list[str] = []

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int, /) -> None:
            tags.append(tag)

    log_trace(Writer(), traced(tmp_path), "*:linear")
    assert "abs max/b:linear (backward) grad of weight" in tags
    assert len(set(tags)) == len(tags) / 2  # of two batches


def test_a_batch_is_written_before_its_backward(tmp_path: Path) -> None:
    """Nobody waits for a backward that may never come; the frames of one that comes are added."""
    model = fxguard.instrument(Net(), trace_to=tmp_path, trace_batch_nums=[0, 1])
    losses = [model(data()[0]).sum(), model(data()[0]).sum()]
    (path,) = tmp_path.iterdir()
    before = fxguard.load_trace(path).batches
    losses[0].backward()
    after = fxguard.load_trace(path).batches
    assert [batch.number for batch in before] == [batch.number for batch in after] == [0, 1]
    assert not of(before[0].frames, "backward")
    assert len(of(after[0].frames, "backward")) == 3
    assert [frame.index for frame in after[0].frames] == list(range(len(after[0].frames)))
    assert after[0].frames[: len(before[0].frames)] == before[0].frames
    assert after[1] == before[1]


def test_losses_that_come_late(tmp_path: Path) -> None:
    """Two forwards, then their backward: each has its own frames."""
    model = fxguard.instrument(Net(), trace_to=tmp_path, trace_batch_nums=[0, 1])
    losses = [model(data()[0]).sum(), model(data()[0]).square().sum()]
    losses[1].backward()
    losses[0].backward()
    (path,) = tmp_path.iterdir()
    batches = fxguard.load_trace(path).batches
    assert [len(of(batch.frames, "backward")) for batch in batches] == [3, 3]
    top = [next(f for f in batch.frames if f.phase == "backward").rows[0] for batch in batches]
    assert top[0].abs_max == 1  # of a sum
    assert top[1].abs_max != 1


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each phase when it has run."""
    model, (x, target) = Net(), data()
    with fxguard.watch(model, trace_batch_nums=[0]):
        out = model(x)
        forward = capsys.readouterr().out.splitlines()
        F.cross_entropy(out, target).backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.5).step()  # of another model
    later = capsys.readouterr().out.splitlines()
    assert forward[0].strip() == "*** Starting batch number=0 ***"
    assert forward[-1].strip() == "*** Finished batch number=0 ***"
    assert [line.strip() for line in later if "***" in line] == [
        "*** Starting loss of batch number=0 ***",
        "*** Finished loss of batch number=0 ***",
        "*** Starting backward of batch number=0 ***",
        "*** Finished backward of batch number=0 ***",
        "*** Starting optimizer of batch number=0 ***",
        "*** Finished optimizer of batch number=0 ***",
    ]


def test_a_backward_that_cannot_run_again_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """What was written since has other numbers: there are none in the trace."""
    model = fxguard.instrument(Net(), trace_batch_nums=[0])
    out = model(data()[0])
    with torch.no_grad():
        model.b.bias.add_(1)
    out.sum().backward()
    printed = capsys.readouterr().out
    assert "graph (backward)" in printed
    assert "not measured: an input of its graph was written since" in printed


def test_a_report_of_a_backward_is_in_the_file(tmp_path: Path) -> None:
    """With its frames after those of forward, and the one that is blamed."""

    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 0).sum().sqrt()  # type: ignore[no-any-return]

    model = fxguard.instrument(Root(), trace_to=tmp_path)
    with pytest.raises(fxguard.NonFiniteError):
        model(data()[0]).backward()
    (path,) = tmp_path.iterdir()
    (batch,) = fxguard.load_trace(path).batches
    (blamed,) = batch.blamed
    assert batch.frames[blamed].title == "sqrt (backward)"
    assert batch.frames[0].phase == "forward"
    assert batch.verdict[0].startswith("backward of sqrt made inf")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_traced_training_is_what_it_was(tmp_path: Path, backend: str | None) -> None:
    """Weights, statistics of a batch norm, random numbers, hooks: as without a trace."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.fc(x)).relu_()
            return hidden + torch.rand_like(hidden) * F.dropout(hidden, 0.5)

    def trained(**options: Any) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model, (x, target) = Drawing(), data()
        seen: list[Tensor] = []
        model.fc.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        run = torch.compile(model, backend=backend) if backend else model
        with fxguard.watch(model, **options) if options else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(run(x), target).backward()
                optimizer.step()
        return model.state_dict(), torch.get_rng_state(), seen

    plain = trained()
    traced_ = trained(trace_to=tmp_path, trace_batch_nums=range(3))
    assert plain[0].keys() == traced_[0].keys()
    assert all(torch.equal(plain[0][name], traced_[0][name]) for name in plain[0])
    assert torch.equal(plain[1], traced_[1])
    assert len(plain[2]) == len(traced_[2]) == 3
    assert all(map(torch.equal, plain[2], traced_[2]))
    (path,) = tmp_path.iterdir()
    assert all(of(batch.frames, "backward") for batch in fxguard.load_trace(path).batches)


def test_a_step_that_is_traced_raises_nothing(tmp_path: Path) -> None:
    """As a forward and a backward that are traced: the trace shows it."""
    model, (x, _) = Net(), data()
    with fxguard.watch(model, trace_to=tmp_path, trace_batch_nums=[0]) as guard:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), torch.inf).step()
    assert guard.last_report is None
    (path,) = tmp_path.iterdir()
    steps = [f for f in fxguard.load_trace(path).batches[0].frames if f.phase == "optimizer"]
    assert len(steps) == 4
    assert all(frame.rows[-1].is_bad for frame in steps)


def test_a_step_that_made_weights_bad_is_in_the_file(tmp_path: Path) -> None:
    """Weights are shown as the forward has read them, or without a number."""
    model, (x, target) = Net().half(), data()
    optimizer = torch.optim.AdamW(model.parameters())  # its eps is 0 in float16
    x[:, 0] = 0
    with fxguard.watch(model, trace_to=tmp_path):
        (model(x.half()).float() * target[:, None]).sum().backward()
        with pytest.raises(fxguard.NonFiniteError):
            optimizer.step()
    (path,) = tmp_path.iterdir()
    (batch,) = fxguard.load_trace(path).batches
    (blamed,) = batch.blamed
    assert batch.frames[blamed].phase == "optimizer"
    assert batch.frames[blamed].kind == "AdamW"
    assert not any(row.is_bad for frame in batch.frames[:blamed] for row in frame.rows)
