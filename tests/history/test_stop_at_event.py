"""``stop_at_event``: a training that ends at the first event of its history."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fxguard
from support.needs import needs

needs("pyarrow")

JUMP = 140

SCRIPT = f"""\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(200):
    x = torch.randn(16, 8)
    if step == {JUMP}:
        x[3] *= 200
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("ended")
"""


def train(model: nn.Module, folder: Path) -> Iterator[int]:
    """A training whose data jumps, step by step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fxguard.watch(model, history=folder, stop_at_event=True):
        for step in range(200):
            x = torch.randn(16, 8)
            if step == JUMP:
                x[3] *= 200
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield step


def test_a_training_ends_when_the_model_is_called_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    steps = list[int]()
    with pytest.raises(fxguard.HistoryEvent) as raised:
        steps.extend(train(model, tmp_path / "run"))
    event = raised.value.event
    assert (event.step, event.cause) == (JUMP, "data")
    assert str(raised.value) == event.headline
    assert isinstance(raised.value, fxguard.FxguardError)
    assert pickle.loads(pickle.dumps(raised.value)).event == event
    (kept,) = fxguard.load_history(tmp_path / "run").events
    assert kept == event
    assert steps == list(range(JUMP + 1))
    model(torch.randn(2, 8))  # which is no longer guarded


def test_the_command_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fxguard", "run", "--history", "run", "--stop-at-event"]
    ended = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 4
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines[0] == f"fxguard: step {JUMP}: the data changed: input"
    assert f"fxguard: stopped at the event of step {JUMP}: the data changed: input" in lines
    assert "fxguard: for the whole run: fxguard history run" in lines
    assert re.match(r"fxguard: checked \d+ batches of Sequential .*nothing found", lines[-1])


def test_it_needs_a_history() -> None:
    with pytest.raises(fxguard.FxguardError, match="give history too"):
        fxguard.instrument(nn.Linear(2, 2), stop_at_event=True)
