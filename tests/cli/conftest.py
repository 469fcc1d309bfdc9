"""A place in which a command line can be run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fxguard.measure import native
from fxguard.script import late, operations
from support.command_line import status
from support.forms import DEVICE, MOSTLY_IN_C


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what a script does to sys is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


class Ran(NamedTuple):
    """How a script has ended under ``fxguard run``."""

    status: Any
    out: str
    err: str

    @property
    def fixes(self) -> list[str]:
        """What it proposes, the first first."""
        lines = self.err.splitlines()
        return [line.strip() for line in lines if line.startswith(("  fix: ", "  or: "))]


@pytest.fixture
def run_here(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Ran]:
    """Runs the text of a script in this process."""

    def run(text: str) -> Ran:
        here.joinpath("script.py").write_text(text)
        return Ran(status("run", "script.py"), *capsys.readouterr())

    return run


@pytest.fixture
def ends_as_ever(
    run_here: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Asserts that a script prints what it prints without fxguard, and ends so; gives stderr."""

    def run(text: str) -> str:
        exec(compile(text, "script.py", "exec"), {"__name__": "plain"})
        expected = capsys.readouterr().out
        ran = run_here(text)
        assert ran.status == 0, ran.err
        assert ran.out == expected
        return ran.err

    return run


@pytest.fixture(params=MOSTLY_IN_C)
def form_of_operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script computes is looked at by the C extension, without one, and on a device."""
    form: str = request.param
    if form == DEVICE:
        request.getfixturevalue("numbers_come_late")
    elif form == "Python":
        monkeypatch.setattr(native, "Operations", None)
        monkeypatch.setattr(operations, "PAIRS_IN_C", False)
    elif native.Operations is None:
        pytest.skip("the C extension is not built")
    return form


@pytest.fixture
def numbers_come_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU is taken for a device that tells numbers later; how many it tells, each time."""
    asked: list[int] = []
    settle = late.LateOperations.settle

    def settled(self: late.LateOperations) -> list[late.Late]:
        asked.append(len(self._all))
        return settle(self)

    monkeypatch.setattr(late, "is_late", lambda tensor: not tensor.is_meta)
    monkeypatch.setattr(late.LateOperations, "settle", settled)
    monkeypatch.setattr(native, "Operations", None)  # which reads what is in memory by itself
    monkeypatch.setattr(native, "abs_min_max", lambda value: None)
    return asked
