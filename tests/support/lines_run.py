"""Notes which lines of fxguard each test runs, in its own process and in those that it starts.

A plugin of pytest: ``python -m pytest -p support.lines_run``, with ``tests`` on ``PYTHONPATH`` and
a folder in ``FXGUARD_LINES``. Each process appends JSON lines to a file of its own in that folder::

    {"test": "tests/plan/test_reader.py::test_x", "passed": true, "seconds": 0.2, "lines": {...}}

``lines`` has an integer for each file below ``fxguard/``: bit n is set where line n ran. In a
process that a test started, ``passed`` is null.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

__all__ = ["FOLDER", "LinesRun"]

FOLDER = "FXGUARD_LINES"  # where the files are written
TEST = "FXGUARD_LINES_TEST"  # the test that started this process
PACKAGE = Path(__file__).resolve().parents[2] / "fxguard"
AT_START = "from support import lines_run\n\nlines_run.start()\n"
REPORTS = pytest.StashKey[list[pytest.TestReport]]()

Tracer = Callable[[FrameType, str, object], Any]


class LinesRun:
    """The lines that have run since the last :meth:`take`."""

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = {}
        self._tracers: dict[str, Tracer] = {}
        for file in PACKAGE.rglob("*.py"):
            lines = self._lines[file.relative_to(PACKAGE).as_posix()] = set()
            self._tracers[str(file)] = tracer_into(lines)

    def begin(self) -> None:
        """Follow all threads that Python starts."""
        tracers = self._tracers

        def called(frame: FrameType, event: str, arg: object) -> Tracer | None:
            tracer = tracers.get(frame.f_code.co_filename)
            return tracer and tracer(frame, event, arg)

        threading.settrace(called)
        sys.settrace(called)

    def take(self) -> dict[str, int]:
        """The lines of each file as the bits of an integer; then they are forgotten."""
        found = {name: sum(1 << line for line in run) for name, run in self._lines.items() if run}
        for run in self._lines.values():
            run.clear()
        return found


def tracer_into(lines: set[int]) -> Tracer:
    """A tracer of one file."""

    def tracer(frame: FrameType, event: str, arg: object) -> Tracer:
        lines.add(frame.f_lineno)
        return tracer

    return tracer


lines_run = LinesRun()


def write(test: str, passed: bool | None, seconds: float = 0.0) -> None:
    """Append what has run since the last time to the file of this process."""
    entry = {"test": test, "passed": passed, "seconds": round(seconds, 3)}
    with Path(os.environ[FOLDER], f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps({**entry, "lines": lines_run.take()}), file=file)


def start() -> None:
    """Follow this program, which a test started, and what is forked from it."""
    lines_run.begin()
    atexit.register(lambda: write(os.environ[TEST], None))


def pytest_configure() -> None:
    """Have each Python that a test starts import a ``sitecustomize`` of ours."""
    folder = Path(os.environ[FOLDER], "at_start")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(AT_START, encoding="utf-8")
    paths = [str(folder), str(PACKAGE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ[TEST] = item.nodeid
    reports = item.stash[REPORTS] = []
    lines_run.take()
    lines_run.begin()  # a test may have ended it
    result = yield
    passed = len(reports) == 3 and all(report.passed for report in reports)
    write(item.nodeid, passed, sum(report.duration for report in reports))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[REPORTS].append(report)
    return report
