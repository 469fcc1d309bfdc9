"""Tries mutants: each in a copy of the checkout, with the tests that run its lines.

A process that has imported torch forks for each try. The fork imports fxguard with the mutant, and
so do the programs that its tests start.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.mutations import Mutant

__all__ = ["ROOT", "Known", "Worker", "in_order", "in_parts"]

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = {str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")}
NOT_BEGUN = 99  # the status of a fork that could not start pytest
SHARES = (0.05, 0.2, 0.75)  # of the seconds for one mutant: most end with the first fork
LEFT = shutil.ignore_patterns(".git", ".venv*", "site", ".*_cache", ".hypothesis")


@dataclass(frozen=True, eq=False)
class Known:
    """One test, as `map` saw it."""

    name: str
    seconds: float
    lines: dict[str, int]  # for each file of fxguard the lines that it runs, as bits

    def runs(self, mutant: Mutant) -> bool:
        """Whether it runs the mutated lines, or, where these run at import, any of the file."""
        bits = self.lines.get(mutant.file, 0)
        if not mutant.in_function:
            return bool(bits)
        return any(bits >> line & 1 for line in range(mutant.line, mutant.last_line + 1))


@dataclass
class Trial:
    """What one fork of pytest did."""

    status: int | None  # of pytest; None when it was stopped
    failed: str  # the test that failed, or ran when it was stopped


@dataclass
class Worker:
    """A copy of this checkout, in which mutants take turns."""

    home: Path
    sound: dict[str, bool] = field(default_factory=dict)  # whether a test passes without a fault

    @property
    def tree(self) -> Path:
        return self.home / "tree"

    def prepare(self) -> None:
        """Copy the checkout, and compile what tests import: here, and not in each fork."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(ROOT, self.tree, ignore=LEFT)
        (self.home / "tmp").mkdir()
        env = {**os.environ, "PYTHONPATH": str(self.tree)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests"]
        subprocess.run(command, cwd=self.tree, env=env, stdout=subprocess.DEVNULL)

    def judge(self, mutant: Mutant, tests: Sequence[Known], seconds: float) -> dict[str, Any]:
        """The outcome of one mutant."""
        began, count = time.monotonic(), 0
        outcome = {"outcome": "alive" if tests else "no test", "by": ""}
        for part in in_parts(tests, seconds):
            count += len(part)
            with self.holding(mutant):
                trial = self.run(part)
            if trial.status != 0 and (not trial.failed or self.passes(trial.failed)):
                outcome = {"outcome": "killed", "by": trial.failed or "import"}
                break
        spent = round(time.monotonic() - began, 1)
        return {"mutant": str(mutant), "kind": mutant.kind, **outcome, "tests": count, "s": spent}

    @contextlib.contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the mutant meanwhile."""
        file = self.tree / "fxguard" / mutant.file
        source, times = file.read_bytes(), file.stat()
        file.write_bytes(mutant.applied_to(source))
        try:
            yield
        finally:
            file.write_bytes(source)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # Python has compiled it

    def passes(self, test: str) -> bool:
        """Whether a test passes alone, without a fault."""
        if test not in self.sound:
            self.sound[test] = self.run([Known(test, 60.0, {})]).status == 0
        return self.sound[test]

    def run(self, tests: Sequence[Known]) -> Trial:
        """Run tests in a fork, up to the first that fails."""
        log = self.home / "log"
        log.write_text("")
        child = os.fork()
        if child == 0:
            self.become_pytest(tests, log)
        limit = time.monotonic() + 10 * seconds_for(tests)  # for those that wait for ever
        status = None
        while status is None and time.monotonic() < limit:
            time.sleep(0.05)
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # itself, or what its tests started and left behind
        if status is None:
            os.waitpid(child, 0)
        if status in (5, NOT_BEGUN):
            raise LookupError(f"no test was collected: see {self.home / 'output'}")
        return Trial(status, log.read_text().rpartition("\n")[2] if status != 0 else "")

    def become_pytest(self, tests: Sequence[Known], log: Path) -> None:
        """Run pytest in the copy; never returns."""
        status = NOT_BEGUN
        try:
            os.setpgid(0, 0)
            seconds = seconds_for(tests)  # a loop without an end: of the processor, not of the day
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            os.chdir(self.tree)
            os.dup2(os.open(self.home / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
                del sys.modules[name]
            sys.path[:] = [str(self.tree), *(path for path in sys.path if path not in CHECKOUT)]
            os.environ.update(
                PYTHONPATH=str(self.tree),
                PYTHONDONTWRITEBYTECODE="1",
                TMPDIR=str(self.home / "tmp"),
                TORCHINDUCTOR_CACHE_DIR=str(self.home / "inductor"),
            )
            sys.dont_write_bytecode = True
            import pytest

            files = dict.fromkeys(test.name.partition("::")[0] for test in tests)
            options = ["-x", "-q", "-p", "no:cacheprovider", *files]
            status = int(pytest.main(options, plugins=[Chosen(tests, log)]))
        finally:
            os._exit(status)


def seconds_for(tests: Sequence[Known]) -> int:
    """More than these tests need."""
    return 60 + int(3 * sum(test.seconds for test in tests))


class Chosen:
    """A plugin of pytest that runs the given tests in the given order, and notes each."""

    def __init__(self, tests: Sequence[Known], log: Path) -> None:
        self.places = {test.name: place for place, test in enumerate(tests)}
        self.log = log

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.log.write_text(nodeid)


def in_order(tests: Sequence[Known], mutant: Mutant) -> list[Known]:
    """The tests that run a mutant, fast ones first, and some of each file before more of one.

    Tests of the mutated package are more likely to fail: they count as four times as fast.
    """
    package = f"tests/{mutant.file.partition('/')[0]}/"
    seen: Counter[str] = Counter()
    costs: dict[Known, float] = {}
    for test in sorted(filter(lambda test: test.runs(mutant), tests), key=lambda x: x.seconds):
        file = test.name.partition("::")[0]
        seen[file] += 1
        costs[test] = test.seconds * seen[file] * (1 if file.startswith(package) else 4)
    return sorted(costs, key=costs.__getitem__)


def in_parts(tests: Sequence[Known], seconds: float) -> Iterator[list[Known]]:
    """The first tests, in parts for one fork each, as far as the time suffices."""
    parts: list[list[Known]] = [[] for _ in SHARES]
    ends = [seconds * sum(SHARES[: place + 1]) for place in range(len(SHARES))]
    spent = 0.0
    for test in tests:
        spent += test.seconds
        place = next((place for place, end in enumerate(ends) if spent <= end), None)
        if place is None and any(parts):
            break
        parts[place or 0].append(test)
    return filter(None, parts)
