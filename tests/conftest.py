"""What every test starts from, and what the campaigns end with."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.guards

from fxguard import forgiving
from fxguard.capture.following import Following
from fxguard.graph.torch_settings import settings_now
from fxguard.guard.guard import GuardedModel

pytest.register_assert_rewrite("support")  # its assertions say as much as those of tests

# TorchDynamo times the guards of each graph, behind a flush of the cache: 30 ms, for a log.
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0

# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs that tests start: threads of several on one core wait for each other, busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of this process: with more of them sums are added up in another order.
THREADS = int(os.environ.get("FXGUARD_TEST_THREADS", "1"))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Apply ``sampled`` and ``slow_unless_campaign`` to the cases of a test."""
    made = yield
    if isinstance(made, list):  # all cases of one test
        leave_to_ci(made)
    return made


def leave_to_ci(cases: list[pytest.Item]) -> None:
    """Mark as slow all cases that have no mark so far, or two of three."""
    unmarked = [
        case
        for case in cases
        if not any(case.get_closest_marker(mark) for mark in ("slow", "campaign"))
    ]
    for place, case in enumerate(unmarked):
        is_left_out = case.get_closest_marker("sampled") and place % 3
        if is_left_out or case.get_closest_marker("slow_unless_campaign"):
            case.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what asks for the fixture ``device``."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")


@pytest.hookimpl(tryfirst=True)  # before its fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Weights of a test, and of its fixtures, are the same each time it runs."""
    torch.manual_seed(0)
    leave_alone_what_is_there(item.path)


_last: list[Path] = []  # the file whose tests run


def leave_alone_what_is_there(file: Path) -> None:
    """Let Python's collector look no more at what is there when the tests of a file begin.

    That is what was imported, and what caches hold: after some thousand tests it would take
    seconds each time, and many tests ask for it again and again.
    """
    if _last != [file]:
        _last[:] = [file]
        gc.collect()
        gc.freeze()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The GPU where there is one, else the CPU. A test that asks for it is marked ``device``.

    On a GPU the test has torch's deterministic kernels: their results can be compared in every bit.
    """
    if not torch.cuda.is_available():
        yield torch.device("cpu")
        return
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def failures_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of fxguard while a model is captured fails the test, and is not worked around."""
    monkeypatch.setattr(GuardedModel, "fallback", False)
    monkeypatch.setattr(forgiving, "RAISES", True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what TorchDynamo compiled for another one."""
    torch.set_num_threads(THREADS)
    if logging.getLogger("torch._dynamo").level != logging.ERROR:  # to look is a lot faster
        torch._logging.set_logs(dynamo=logging.ERROR)  # graph breaks are expected here
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """A test that changes torch's global state fails itself, and no other."""
    from support.torch_state import changes_since, state_now  # not before, as above

    before, restore = state_now(), settings_now()
    yield
    changes = changes_since(before)
    if changes:
        restore()
    assert not changes


@pytest.fixture(autouse=True)
def no_mode_is_left(torch_is_left_as_it_was: None) -> Iterator[None]:
    """No test runs under the mode of a training that raised in another one, and left it there."""
    yield
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, Following):
            mode.forget()
            mode.retire()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sum up what the campaigns, or their samples, noted: planted faults and healthy runs."""
    noted: dict[str, list[Any]] = defaultdict(list)
    skipped: dict[str, list[str]] = defaultdict(list)
    for category, reports in terminalreporter.stats.items():
        for report in reports:
            if getattr(report, "when", "") != "call":
                continue
            for key, value in report.user_properties:
                noted[key].append(value)
            if category == "skipped" and "no_false_alarm" in report.nodeid:
                reason = report.longrepr[2].removeprefix("Skipped: ")
                skipped[reason].append(report.nodeid.partition("[")[2].rstrip("]"))
    if planted := noted["planted"]:
        terminalreporter.section("planted faults")
        terminalreporter.line(
            f"found {sum(found for _, found, _ in planted)} / "
            f"planted {sum(count for *_, count in planted)} in {len(planted)} runs over "
            f"{len({title for title, *_ in planted})} models and backends"
        )
    if runs := noted["healthy run"]:
        terminalreporter.section("false alarms")
        terminalreporter.line(
            f"healthy runs: {len(runs)}, detections: {sum(count for *_, count in runs)}, "
            f"notes: {sum(notes for *_, notes, _, _ in runs)}, "
            f"not judged: {sum(count for *_, count, _ in runs)}, "
            f"architectures: {len({name for name, *_ in runs})}, "
            f"skipped: {sum(map(len, skipped.values()))}"
        )
        for reason, names in sorted(skipped.items()):
            terminalreporter.line(f"skipped: {reason}: {', '.join(sorted(names))}")
    if compared := noted["every operation"]:
        reasons: Counter[str] = Counter()
        for *_, not_judged in compared:
            reasons.update(not_judged)
        terminalreporter.line(
            f"operations compared with float64: {sum(count for count, *_ in compared)}, "
            f"sums and casts that became a mask: {sum(masks for _, masks, *_ in compared)}, "
            f"mostly flushed to zero: {sum(zeros for *_, zeros, _ in compared)}"
        )
        for reason, count in reasons.most_common():
            terminalreporter.line(f"not judged: {count} times: {reason}")
    if trials := noted["operator database"]:
        terminalreporter.section("operator database")
        for line in operator_lines(trials):
            terminalreporter.line(line)
    for reason, count, names in noted["left out"]:
        terminalreporter.line(f"left out of {count} architectures: {reason}: {names}")
    idle: dict[str, list[str]] = defaultdict(list)
    for name, variant, reason in noted["no healthy run"]:
        idle[reason].append(f"{name} ({variant})")
    for reason, names in sorted(idle.items()):
        terminalreporter.line(f"variants without a run: {reason}: {', '.join(sorted(names))}")


def operator_lines(trials: list[Any]) -> Iterator[str]:
    """What was counted in each database, mode and dtype, and which operations were set apart."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    apart: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for title, counted, set_apart in trials:
        counts[title].update(counted)
        for reason, names in set_apart.items():
            apart[title][reason].update(names)
    for title, counted in counts.items():
        yield f"{title}: " + ", ".join(f"{count} {what}" for what, count in counted.items())
        for reason, names in apart[title].items():
            yield f"  {reason}: {', '.join(sorted(names))}"
