"""A program that is killed between any two things that it does to the folder loses no step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fxguard.history._files import listed
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.history.history import History, load_history
from support.needs import needs

needs("pyarrow")

STRETCH = 16  # steps, so that most of what is done is closing and thinning
SERIES = [Series(str(position), "operation", "matmul") for position in range(3)]
ACTS = ("os.write", "os.fsync", "os.link", "pathlib.Path.replace", "pathlib.Path.unlink")


class Killed(BaseException):
    """In the place of ``kill -9``."""


class Killer:
    """Ends the program at one of its acts: that and all later ones do nothing."""

    def __init__(self, at: int) -> None:
        self.at, self.acts = at, 0

    def may_end(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.acts += 1
            if self.acts > self.at:
                raise Killed
            return act(*args, **kwargs)

        return wrapped


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_open_stretch", "_closing"):
        monkeypatch.setattr(f"fxguard.history.{module}.STRETCH", STRETCH)
    monkeypatch.setattr("fxguard.history._writer.BETWEEN", 4)


def run(folder: Path, steps: int, told: list[int]) -> None:
    """A program that writes each row at once, and tells each."""
    writer = Writer(folder, about={})
    try:
        for series in SERIES:
            writer.register(series)
        for step in range(writer.next_step, writer.next_step + steps):
            writer.add(Row(step, [1.0] * 3, [float(step)] * 3))
            writer.flush()
            told.append(step)
        writer.close()
    finally:
        writer.forked()  # as the system closes the files of a process that it ends


def check(history: History, told: list[int]) -> None:
    """Each step is there once, and as large as it was."""
    for series in SERIES[: len(history.series)]:
        track = history.get(series.name)
        covered = [
            step
            for first, last in zip(track.steps, track.last_steps, strict=True)
            for step in range(first, last + 1)
        ]
        assert covered == list(range(len(covered)))
        assert told[-1:] <= covered[-1:] <= [len(told)]
        assert list(track.high) == list(map(float, track.last_steps))


def killed_at(at: int, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> bool:
    """Whether there are so many acts; the folder is read after the program, and goes on."""
    told = list(load_history(folder).steps) if folder.exists() else []
    killer = Killer(at)
    with monkeypatch.context() as patched:
        for name in ACTS:
            module, _, act = name.rpartition(".")
            owner = Path if module == "pathlib.Path" else os
            patched.setattr(owner, act, killer.may_end(getattr(owner, act)))
        try:
            run(folder, steps, told)
        except Killed:
            pass
        else:
            return False
    if told:
        check(load_history(folder), told)
    before = len(told)
    run(folder, 40, told)
    assert before <= told[-1] + 1 - 40 <= before + 1  # the row that was not told may be there
    told[:] = range(told[-1] + 1)
    check(load_history(folder), told)
    assert listed(folder)[1] == []
    shutil.rmtree(folder)
    return True


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.campaign), 5])
def test_a_crash_between_any_two_acts_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Of a run that closes stretches, and thins the first."""
    at = 0
    while killed_at(at, tmp_path / "history", monkeypatch, 36):
        at += every
    assert at > 50


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.campaign), 5])
def test_a_crash_while_files_become_one_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Of a run during which 16 thinned stretches of the run before become one."""
    run(tmp_path / "before", 505, [])
    assert len(list((tmp_path / "before").glob("*.parquet"))) == 32
    at = 0
    while True:
        shutil.copytree(tmp_path / "before", tmp_path / "history")
        if not killed_at(at, tmp_path / "history", monkeypatch, 20):
            break
        at += every
    assert at > 50
    assert len(list((tmp_path / "history").glob("*.parquet"))) < 20


CHILD = """
import sys
sys.path[:0] = {path!r}
from fxguard.history import _open_stretch, _closing, _writer
_open_stretch.STRETCH = _closing.STRETCH = 16
_open_stretch.SECONDS = -1.0
from fxguard.history._series import Row, Series
from fxguard.report.event import Event
writer = _writer.Writer({folder!r}, about={{}})
for position in range(3):
    writer.register(Series(str(position), "operation", "matmul"))
step = writer.next_step
while True:
    writer.add(Row(step, [1.0] * 3, [float(step)] * 3))
    if step % 100 == 50:
        writer.event(Event(step, "data", "input 0"))
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize("times", [pytest.param(60, marks=pytest.mark.campaign), 3])
def test_kill_9_loses_nothing(tmp_path: Path, times: int) -> None:
    """A real one, of a process that does little but close and thin stretches."""
    program = CHILD.format(folder=str(tmp_path), path=sys.path)
    told: list[int] = []
    events: set[int] = set()
    for turn in range(times):
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert child.stdout is not None
        last = len(told) + Random(turn).randrange(1, 700)
        for line in child.stdout:
            if int(line) >= last:
                break
        child.kill()
        rest = child.stdout.read().split("\n")[:-1]
        assert child.wait() == -signal.SIGKILL
        begun = len(told)
        told[:] = range(int([line, *rest][-1]) + 1)
        events |= {step for step in told[begun:] if step % 100 == 50}
        history = load_history(tmp_path)
        check(history, told)
        assert events <= {event.step for event in history.events}
        told[:] = history.steps
    assert len(history.runs) == times
