"""The list of long tests is true of what pytest collects."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from support.long_tests import LONG, THESE, Long

ROOT = Path(__file__).resolve().parents[2]


@cache
def collected(expression: str) -> list[str]:
    """The names that pytest collects from the files of the list."""
    named = [text for long in LONG for text in (long.test, long.covered_by) if text != THESE]
    files = sorted({f"tests/{name.partition('::')[0]}" for name in named})
    command = [sys.executable, "-m", "pytest", *files, "-m", expression, "--co", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("long", LONG, ids=lambda long: long.test)
def test_each_change_runs_something_in_its_place(long: Long) -> None:
    """The cases that stay, or the other test; and the campaign runs those that do not stay."""
    always, later = collected("not campaign"), collected("campaign")
    stay = [f"{long.test}[{case}]" for case in long.stay]
    assert set(stay) <= set(always)
    assert any(name.partition("[")[0] == long.test for name in later)
    covering = long.test if long.covered_by == THESE else long.covered_by
    assert any(name.partition("[")[0] == covering for name in always)
