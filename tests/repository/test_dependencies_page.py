"""docs/what-outputs-depend-on.md: its commands run, and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.shown import Command, commands_of, files_of, run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "what-outputs-depend-on.md").read_text(
    encoding="utf-8"
)
PERCENT = re.compile(r"[\d.]+ %")  # of random weights: other processors round otherwise


@pytest.mark.parametrize("command", commands_of(PAGE), ids=lambda command: command.line)
def test_commands_print_what_is_shown(command: Command, tmp_path: Path) -> None:
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    printed = run(command.line, tmp_path)
    assert PERCENT.sub("N %", printed).rstrip() == PERCENT.sub("N %", command.shown).rstrip()
