"""What every test starts from, and what the campaigns end with."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxguard import guard

# The test whose runs are counted.
CAMPAIGN = "test_every_architecture"


@pytest.fixture(autouse=True)
def failures_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of fxguard while a model is captured fails the test, and is not worked around."""
    monkeypatch.setattr(guard, "LEAVE_WHAT_FAILS", False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what TorchDynamo compiled for another one."""
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # graph breaks are expected here
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the healthy runs of the campaign, and say what was left out and why."""
    runs: list[Any] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    idle: dict[str, list[str]] = defaultdict(list)
    for category, reports in terminalreporter.stats.items():
        for report in reports:
            if getattr(report, "when", "") != "call" or CAMPAIGN not in report.nodeid:
                continue
            properties = report.user_properties
            runs += [value for key, value in properties if key == "healthy run"]
            if category == "skipped":
                reason = report.longrepr[2].removeprefix("Skipped: ")
                skipped[reason].append(report.nodeid.partition("[")[2].rstrip("]"))
            for key, value in properties:
                if key == "no healthy run":
                    idle[value[2]].append(f"{value[0]} ({value[1]})")
    if not runs:
        return
    terminalreporter.section("false alarms")
    terminalreporter.line(
        f"healthy runs: {len(runs)}, detections: {sum(bool(count) for *_, count in runs)}, "
        f"architectures: {len({name for name, *_ in runs})}, "
        f"skipped: {sum(map(len, skipped.values()))}"
    )
    for title, groups in (("skipped", skipped), ("variants without a run", idle)):
        for reason, names in sorted(groups.items()):
            terminalreporter.line(f"{title}: {reason}: {', '.join(sorted(names))}")
