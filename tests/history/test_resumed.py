"""Histories of trainings that were begun again: bands go on, and nothing is told of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.history._begin import _next_run
from fxguard.history._open_stretch import STRETCH
from fxguard.history._resumed import Beginning, last_rows
from fxguard.history._series import Kind, Row, Series
from fxguard.history._writer import Writer
from fxguard.report.event import Event
from support.needs import needs

needs("pyarrow")

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn

fault = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
begin = 0
if os.path.exists("checkpoint.pt"):
    kept = torch.load("checkpoint.pt")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    begin = kept["step"]
for step in range(begin, begin + 300):
    torch.manual_seed(step)
    x = torch.randn(128 if step % 50 else 100, 8)  # a last short batch is captured anew
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    if fault == "data" and step == begin + 3:
        x, y = 30 * x + 50, 2 - y
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == begin + 250:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(kept, "checkpoint.pt")
    if fault == "killed" and step == begin + 260:
        time.sleep(1.2)
    if fault == "killed" and step == begin + 270:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, fault: str) -> list[str]:
    """What fxguard says of events."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fxguard", "run", "--history", "kept", "train.py", fault]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    return [line for line in ran.stderr.splitlines() if line.startswith("fxguard: step ")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no SIGKILL")
def test_a_script_that_is_started_again(tmp_path: Path) -> None:
    """After a kill, after a good end; then with a bad batch in its fourth step."""
    assert run(tmp_path, "killed") == []
    assert run(tmp_path, "none") == []
    said = run(tmp_path, "data")
    history = fxguard.load_history(tmp_path / "kept")
    assert len(history.runs) == 3
    first, second = history.resumed
    assert 260 <= first <= 271  # the last second before a kill may be lost
    assert second == first + 300
    assert said == [f"fxguard: step {second + 3}: the data changed: input"]
    (event,) = history.events
    assert event.step == second + 3
    loss = history.get(next(name for name in history.series if name.startswith("loss ")))
    assert list(loss.steps) == list(range(second + 300))
    assert str(history).startswith(
        f"steps 0 to {second + 299}, {len(history.series)} series, resumed at steps {first} and "
        f"{second}, 1 event\n"
    )
    assert history.lines()[-1] == f"resumed at steps {first} and {second}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)).relu())  # type: ignore[no-any-return]


Change = Callable[[int, Net, torch.optim.Optimizer], None]


def train(
    folder: Path,
    steps: range,
    model: Net,
    optimizer: torch.optim.Optimizer,
    change: Change = lambda step, model, optimizer: None,
) -> None:
    fxguard.instrument(model, history=folder)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 8, generator=generator)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        change(step, model, optimizer)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    fxguard.remove(model)


def trained(folder: Path) -> tuple[Net, torch.optim.Optimizer]:
    """A model after 200 steps, and its optimizer, as a new process has loaded them."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(folder, range(200), model, optimizer)
    other = Net()
    other.load_state_dict(model.state_dict())
    its = torch.optim.AdamW(other.parameters(), lr=3e-3)
    its.load_state_dict(optimizer.state_dict())
    return other, its


def overwrites(step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if step == 205:
        with torch.no_grad():
            model.outer.weight.mul_(-8)


def raises(step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5 if step == 202 else 3e-3


@pytest.mark.parametrize(
    ("change", "headline"),
    [
        (overwrites, "step 205: outer.weight was written by something else than the optimizer"),
        (raises, "step 202: learning rate of AdamW's step changed"),
    ],
)
def test_a_jump_in_the_first_steps_of_a_resumed_run(
    change: Change, headline: str, tmp_path: Path
) -> None:
    """What is usual is known from the run before."""
    model, optimizer = trained(tmp_path)
    train(tmp_path, range(200, 220), model, optimizer, change)
    (event,) = fxguard.load_history(tmp_path).events
    assert event.headline.startswith(headline)


def test_another_training_in_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That its loss begins anew is no event. From then on it is judged by itself."""
    trained(tmp_path)
    assert capsys.readouterr().err == ""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def late(step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
        if step == 150:
            with torch.no_grad():
                model.outer.weight.mul_(-8)

    train(tmp_path, range(160), model, optimizer, late)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("fxguard: step 200: this run does not begin where the one before has")
    (event,) = fxguard.load_history(tmp_path).events
    assert (event.step, event.cause) == (350, "weights")


def test_events_of_the_first_run_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(tmp_path, range(230), model, optimizer, overwrites)
    train(tmp_path, range(230, 330), model, optimizer)
    history = fxguard.load_history(tmp_path)
    assert [event.step for event in history.events] == [205]
    assert history.resumed == (230,)


def test_the_last_rows_of_a_rank(tmp_path: Path) -> None:
    """The last 256, over the ends of files, of the series that are known now."""
    series = [Series(f"s{at}", "loss", f"s{at}") for at in range(3)]
    for rank in range(2):
        writer = Writer(tmp_path, rank=rank, about={})
        for one in series:
            writer.register(one)
        for step in range(STRETCH - 100, STRETCH + 100):
            writer.add(Row(step, [rank, step, 1.0], [rank, step + 1.0, 1.0]))
        writer.close()
    end = _next_run(tmp_path, 1).first
    rows = last_rows(tmp_path, 1, [series[1], Series("new", "loss", "new"), series[0]], end)
    assert [row.step for row in rows] == list(range(STRETCH - 100, STRETCH + 100))
    assert (rows[7].low[0], rows[7].high[0]) == (rows[7].step, rows[7].step + 1)
    assert rows[7].low[1] != rows[7].low[1]
    assert rows[7].low[2] == 1.0
    assert last_rows(tmp_path, 2, series, end) == []
    for path in tmp_path.glob("*.parquet"):
        path.write_bytes(b"damaged")
    assert last_rows(tmp_path, 1, series, end) == []


OF_LOSS = "the loss goes from 1.4 to 2.6 in step 200"
ELIMINATED = "what runs before it is in its band, as are range and mean of targets"


@pytest.mark.parametrize(
    ("norm", "evidence", "is_elsewhere"),
    [
        pytest.param(2.0, ("loss goes from 1.4 to 2.6", ELIMINATED, OF_LOSS), True, id="others"),
        pytest.param(1.0, ("loss goes from 1.4 to 2.6", ELIMINATED, OF_LOSS), False, id="the same"),
        pytest.param(2.0, ("the mean of targets goes from 1 to 9", OF_LOSS), False, id="changed"),
    ],
)
def test_data_are_not_blamed_for_weights_of_another_run(
    norm: float, evidence: tuple[str, ...], is_elsewhere: bool
) -> None:
    """As where a checkpoint's experts were loaded in another order: each range is as usual."""
    kinds: list[Kind] = ["weight", "drift"]
    series = [Series(f"{kind} {name}", kind, name) for name in "ab" for kind in kinds]
    usual = [1.0, 0.0, 1.0, 0.0]
    beginning = Beginning(series, [Row(step, [*usual], [*usual]) for step in range(100, 200)])
    now = [norm, 0.0, norm, 0.0]
    beginning.take(Row(200, [*now], [*now]))
    event = Event(200, "data", "targets", "train.py:9", evidence=evidence)
    said = beginning.elsewhere([event])
    assert bool(said) == is_elsewhere
    assert not said or said.endswith(f"and is judged by itself: {OF_LOSS}")
