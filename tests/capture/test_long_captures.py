"""A line on stderr while a model is captured, if that takes long."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.capture import long_captures
from fxguard.guard.guard import GuardedModel

TOLD = "fxguard: capturing Net takes some seconds\n"


class Net(nn.Module):
    """Some layers, and a break of the graph."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.last = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


class Terminal(io.StringIO):
    """A stream that overwrites its last line."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every capture takes long, and is one that nobody asked for, as outside of tests."""
    monkeypatch.setattr(long_captures, "AFTER", 0.0)
    monkeypatch.setattr(GuardedModel, "fallback", True)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("breaks", [False, True])
def test_a_pipe_is_told_once(breaks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is captured in the first call, and not in later ones."""
    model = fxguard.instrument(Net(breaks))
    for _ in range(3):
        model(torch.rand(2, 4))
    assert capsys.readouterr().err == TOLD


@pytest.mark.usefixtures("at_once")
def test_a_terminal_shows_the_progress_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is overwritten, and gone at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("fxguard.report.terminal.PERIOD", 0.0)
    fxguard.instrument(Net())(torch.rand(2, 4))
    lines = terminal.getvalue().split("\r")
    shown = [line.strip() for line in lines if line.strip()]
    assert shown[0].startswith("fxguard: capturing Net ")
    shares = [int(line.rpartition(" ")[2].removesuffix("%")) for line in shown]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert not lines[-1].strip()
    assert "\n" not in terminal.getvalue()


def test_a_short_capture_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GuardedModel, "fallback", True)
    fxguard.instrument(Net())(torch.rand(2, 4))
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
def test_who_compiles_the_model_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """They have asked for it."""
    torch.compile(fxguard.instrument(Net()), backend="eager")(torch.rand(2, 4))
    assert capsys.readouterr().err == ""
