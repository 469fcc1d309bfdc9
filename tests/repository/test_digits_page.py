"""docs/where-do-the-digits-go.md: its commands run, and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.shown import Command, commands_of, files_of, run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "where-do-the-digits-go.md").read_text(
    encoding="utf-8"
)
NUMBER = re.compile(
    r"(?<![\w.:])\d+(\.\d+)?(e-\d+)?(?= %| times| of 2\.4| of 2400|$)", re.MULTILINE
)
FIRST = re.compile(r"by ([\d.]+) %: ")
APART = 1.25  # times: kernels of other processors have other roundings


def without_numbers(text: str) -> list[str]:
    """Its lines, in any order: rows of nearly equal shares may change places."""
    rows = (NUMBER.sub("N", line) for line in text.splitlines())
    return sorted(row for row in rows if " more" not in row)


@pytest.mark.parametrize("command", commands_of(PAGE), ids=lambda command: command.line)
def test_commands_print_what_is_shown(command: Command, tmp_path: Path) -> None:
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    printed = run(command.line, tmp_path)
    assert without_numbers(printed) == without_numbers(command.shown), printed
    for shown, found in zip(FIRST.findall(command.shown), FIRST.findall(printed), strict=True):
        assert 1 / APART <= float(found) / float(shown) <= APART


def test_numbers_are_left_out() -> None:
    """The clean twin: names, lines and places are not."""
    line = "  60 %  mul rope.py:11: x = y * 2  own error 0.19 %, amplified 590 times, by sin a.py:4"
    left = "  N %  mul rope.py:11: x = y * 2  own error N %, amplified N times, by sin a.py:4"
    assert without_numbers(line) == [left]
