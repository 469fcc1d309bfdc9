"""Ranges in TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import fxguard
from fxguard.integrations.tensorboard import log_history, log_ranges, log_report, log_trace
from support.needs import needs
from support.small_history import EVENT, history_in
from support.t5_overflow import REPORT

accumulator = needs("tensorboard.backend.event_processing.event_accumulator")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x) * x
        return torch.aminmax(hidden * 2, dim=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[1] + self.second(x)[0]


X = torch.linspace(-1, 1, 8).view(2, 4)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard finds in a folder: tag to steps and values."""
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_a_training_loop(tmp_path: Path) -> None:
    """The numbers of chosen operations, batch by batch, under tags that stay the same."""
    model = fxguard.instrument(Net())
    writer = SummaryWriter(str(tmp_path))
    wanted: dict[str, list[tuple[int, float]]] = {}
    for step in range(3):
        model(X * (step + 1))
        frames = fxguard.guard_of(model).frames()
        assert log_ranges(writer, frames, step, "first:mul") == 4
        muls = [frame for frame in frames if frame.title == "first mul"]
        for tag, frame in zip(("first:mul", "first:mul 2"), muls, strict=True):
            row = frame.rows[-1]
            wanted.setdefault(f"abs max/{tag}", []).append((step, row.abs_max))
            wanted.setdefault(f"abs min/{tag}", []).append((step, row.abs_min))
    writer.close()
    found = scalars(tmp_path)
    assert found.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert found[tag] == [(step, pytest.approx(value)) for step, value in values]


@pytest.mark.parametrize(
    ("select", "tags"),
    [
        ("*.up", ["first.up:Linear", "second.up:Linear"]),
        (["second:aminmax"], ["second:aminmax", "second:aminmax output[1]"]),
        (["*:add", "first:Block"], ["first:Block", "first:Block output[1]", "add"]),
    ],
)
def test_what_is_selected(select: Any, tags: list[str]) -> None:
    """Globs as for ``ignore``; several outputs have their labels."""
    written = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            written.append(tag)

    model = fxguard.instrument(Net())
    model(X)
    log_ranges(Writer(), fxguard.guard_of(model).frames(), 0, select)
    assert [tag.removeprefix("abs max/") for tag in written[::2]] == tags


def test_a_history(tmp_path: Path) -> None:
    needs("pyarrow")
    written = []

    class Texts:
        def add_text(self, tag: str, text: str, step: int) -> None:
            written.append((tag, text, step))

    assert log_history(Texts(), history_in(tmp_path)) == 1
    ((tag, text, step),) = written
    assert (tag, step) == ("fxguard", 12)
    assert text.startswith(f"    {EVENT.headline}\n")


def test_a_trace(tmp_path: Path) -> None:
    """Every batch, at its number; inf is written as inf."""
    model = fxguard.instrument(Net(), trace_batch_nums=[1, 4], trace_to=tmp_path)
    for number in range(5):
        model(X * (1e30 if number == 4 else 1.0))
    trace = fxguard.load_trace(tmp_path / "Net-0.jsonl")
    writer = SummaryWriter(str(tmp_path / "runs"))
    log_trace(writer, trace, "first:mul")
    writer.close()
    found = scalars(tmp_path / "runs")["abs max/first:mul"]
    assert [step for step, _ in found] == [1, 4]
    assert found[1][1] == math.inf
    with pytest.warns(RuntimeWarning, match=r"'first:log' selects nothing here: in these modules"):
        assert log_ranges(writer, trace.batches[0].frames, 0, "first:log") == 0
    with pytest.raises(fxguard.FxguardError, match=r"selects nothing .* there is first\.up:Linear"):
        log_trace(writer, trace, "decoder.*")


def texts(folder: Path) -> list[tuple[int, str]]:
    """What TensorBoard finds under the tag ``fxguard``."""
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    found = events.Tensors("fxguard/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


@pytest.mark.parametrize("way", ["report", "trace"])
def test_a_verdict_is_a_text(way: str, tmp_path: Path) -> None:
    """Line by line, with cause, numbers and fix."""
    with SummaryWriter(str(tmp_path)) as writer:
        if way == "report":
            log_report(writer, REPORT, 7)
        else:
            batch = fxguard.types.TracedBatch(7, REPORT.frames, None, tuple(REPORT.verdict))
            healthy = fxguard.types.TracedBatch(6, REPORT.frames[:1])
            log_trace(writer, fxguard.types.Trace("T5", None, "2", (healthy, batch)))
    [(step, text)] = texts(tmp_path)
    assert step == 7
    assert [line.removeprefix("    ") for line in text.splitlines()] == REPORT.verdict


def test_a_writer_without_texts_gets_the_scalars() -> None:
    """One method is enough for :func:`log_trace`."""

    class Scalars:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            pass

    batch = fxguard.types.TracedBatch(7, REPORT.frames, None, tuple(REPORT.verdict))
    assert log_trace(Scalars(), fxguard.types.Trace("T5", None, "2", (batch,))) == 4
