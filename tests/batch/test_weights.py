"""Frames show weights as they were in their batch, or without a number."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import fxguard

X = torch.ones(3, 4)


class Net(nn.Module):
    """Two layers, of which the second is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.free, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.free(x)) * self.scale


def weights(frames: Any) -> dict[str, tuple[float | None, str]]:
    """Largest magnitude and note of each weight's row."""
    return {
        f"{frame.name}.{row.label}": (row.abs_max, row.note)
        for frame in frames
        for row in frame.rows
        if row.label in ("weight", "bias")
    }


def largest(model: nn.Module) -> dict[str, tuple[float | None, str]]:
    return {name: (float(p.detach().abs().max()), "") for name, p in model.named_parameters()}


def step(model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    make([p for p in model.parameters() if p.requires_grad], lr=0.1, **options).step()


WRITES: dict[str, Callable[[Any], object]] = {
    "sgd": lambda m: step(m, torch.optim.SGD),
    "sgd foreach": lambda m: step(m, torch.optim.SGD, foreach=True),
    "sgd fused": lambda m: step(m, torch.optim.SGD, fused=True),
    "adamw": lambda m: step(m, torch.optim.AdamW),
    "adamw foreach": lambda m: step(m, torch.optim.AdamW, foreach=True),
    "adamw fused": lambda m: step(m, torch.optim.AdamW, fused=True),
    "copy_": lambda m: [p.copy_(torch.full_like(p, 7.0)) for p in m.free.parameters()],
    "data =": lambda m: [setattr(p, "data", torch.full_like(p, 7.0)) for p in m.free.parameters()],
    "another parameter": lambda m: setattr(m, "free", nn.Linear(4, 4)),
    "load_state_dict": lambda m: m.free.load_state_dict(
        {name: torch.full_like(p, 7.0) for name, p in m.free.state_dict().items()}
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_weights_that_were_written_since_have_no_number(name: str) -> None:
    """Whoever wrote them; those that were not keep theirs, and so does the batch's own output."""
    model = fxguard.instrument(Net())
    model(X).sum().backward()
    guard = fxguard.guard_of(model)
    then, before = largest(model), guard.frames()
    assert weights(before) == then
    with torch.no_grad():
        WRITES[name](model)
    after = guard.frames()
    assert {label: row for label, row in weights(after).items() if "frozen" in label} == {
        label: row for label, row in then.items() if "frozen" in label
    }
    free = [row for label, row in weights(after).items() if "free" in label]
    assert {number for number, _ in free} == {None}
    assert {note for _, note in free} <= {"changed since", "not kept"}
    assert [f.rows[-1] for f in after] == [f.rows[-1] for f in before]


def test_a_report_shows_no_weight_of_later_above_an_output_of_earlier() -> None:
    """A NaN that an optimizer's step made stands in the frames of the batch after it only."""
    model = fxguard.instrument(Net())
    model(X)
    with torch.no_grad():
        model.free.weight.fill_(math.nan)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(X)
    earlier = [f for f in caught.value.report.frames if f.batch_number == 0 and f.name == "free"]
    current = [f for f in caught.value.report.frames if f.batch_number == 1 and f.name == "free"]
    assert [row.note for row in earlier[0].rows][:2] == ["changed since", ""]
    assert str(earlier[0].rows[-1].abs_max) != "nan"
    assert str(current[0].rows[0].abs_max) == "nan"
    assert "changed since weight" in str(caught.value.report)


def test_weights_that_nobody_writes_are_shown_in_all_frames() -> None:
    """The clean twin: batch after batch of evaluation, and in a report."""
    model = fxguard.instrument(Net().eval(), max_frames_to_save=30)
    with torch.no_grad():
        for _ in range(3):
            model(X)
        with pytest.raises(fxguard.NonFiniteError) as caught:
            model(X * 3e38 * 10)
    for number in range(3):
        frames = [f for f in caught.value.report.frames if f.batch_number == number]
        assert weights(frames) == largest(model)


def test_weights_without_a_counter_have_no_number_later() -> None:
    """Those made in inference mode may be written without leaving any sign."""
    with torch.inference_mode():
        model = Net()
    fxguard.instrument(model)
    with torch.inference_mode():
        model(X)
    rows = weights(fxguard.guard_of(model).frames())
    assert set(rows.values()) == {(None, "not kept")}


def test_a_trace_shows_all_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """It is written when its batch ends, before anybody can write a weight."""
    with torch.inference_mode():
        model = Net()
        fxguard.instrument(model, trace_batch_nums=[0])
        model(X)
    printed = capsys.readouterr().out
    assert "not kept" not in printed
    for number, _ in largest(model).values():
        assert f"{number:8.2e}" in printed


@pytest.fixture
def hooks() -> Callable[[], int]:
    """How many hooks on optimizers there are more than before the test."""

    def count() -> int:
        gc.collect()  # models of other tests
        return len(optimizers._global_optimizer_post_hooks)

    torch._dynamo.reset()  # it may keep what other tests compiled, and so their models
    start = count()
    return lambda: count() - start


def test_optimizers_are_left_as_they_were(hooks: Callable[[], int]) -> None:
    """The one hook on optimizers is there while a model is instrumented."""
    model = fxguard.instrument(Net())
    assert hooks() == 0
    model(X)
    model(X)
    assert hooks() == 1
    fxguard.remove(model)
    assert hooks() == 0
    forgotten = fxguard.instrument(Net())
    forgotten(X)
    del forgotten
    torch._dynamo.reset()  # it keeps what it compiled, and so the model
    assert hooks() == 0


def test_a_compiled_optimizer_is_not_compiled_again() -> None:
    """The hook reads nothing: steps of a compiled optimizer find their graph again."""
    model = fxguard.instrument(Net())
    compiled = 0

    def count(graph_module: Any, example_inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph_module.forward

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    @torch.compile(backend=count)
    def stepped() -> None:
        optimizer.step()

    counts = []
    for _ in range(5):
        model(X).sum().backward()
        stepped()
        optimizer.zero_grad(set_to_none=False)
        counts.append(compiled)
    assert counts[-1] == counts[1] > 0
    guard = fxguard.guard_of(model)
    assert weights(guard.frames())["free.weight"][0] is None
