"""The pages of docs/symptoms/: each command runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.shown import Command, blocks_of, commands_of, files_of, is_as_shown, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "symptoms").glob("*.md"))}


@pytest.mark.parametrize("name", PAGES)
def test_commands_print_what_is_shown(name: str, tmp_path: Path) -> None:
    """In a folder that holds the files of the page and nothing else."""
    page = PAGES[name].read_text(encoding="utf-8")
    for file, text in files_of(page).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    commands = commands_of(page)
    assert commands
    for command in commands:
        printed = run(command.line, tmp_path)
        assert is_as_shown(command.shown, printed), f"$ {command.line}\n{printed}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_what_to_run(name: str) -> None:
    """Within half a page, and it is what the example runs."""
    page = PAGES[name].read_text(encoding="utf-8")
    info, first = blocks_of(page)[0]
    assert page.partition("```")[0].count("\n") < 12
    if info == "sh":
        run_here = [command.line for command in commands_of(page)]
        assert all(any(line.startswith(top) for line in run_here) for top in first.splitlines())
    else:
        assert info == "python no-run"
        assert any(first in text for text in files_of(page).values())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_nothing_of_a_machine(name: str) -> None:
    """No times, no folders of somebody's."""
    for command in commands_of(PAGES[name].read_text(encoding="utf-8")):
        assert not re.search(r"\d+\.\d+ ?s\b|(?<![\w.])/\w", command.shown)


def test_both_lists_lead_to_every_page() -> None:
    """docs/index.md and docs/recipes.md start from what somebody sees."""
    for start in "index.md", "recipes.md":
        text = (ROOT / "docs" / start).read_text(encoding="utf-8")
        assert [name for name in PAGES if f"(symptoms/{name}.md)" not in text] == []


def test_what_is_left_out_is_marked() -> None:
    """The clean twin: a line that was not printed, or is missing without a mark, is seen."""
    assert is_as_shown("one\n...\nfour\n", "one\ntwo\nthree\nfour\n")
    assert not is_as_shown("one\nfour\n", "one\ntwo\nthree\nfour\n")
    assert not is_as_shown("one\n...\nfive\n", "one\ntwo\nthree\nfour\n")
    assert not is_as_shown("four\n...\none\n", "one\ntwo\nthree\nfour\n")


def test_a_page_is_taken_apart() -> None:
    """Files by their titles, commands with what is below them."""
    page = """# A page
```sh
python a.py
```
```python title="a.py"
a = 1
```
```console
$ A=1 python a.py
one
...
$ python a.py
```
"""
    assert files_of(page) == {"a.py": "a = 1\n"}
    assert commands_of(page) == [
        Command("A=1 python a.py", "one\n...\n"),
        Command("python a.py", ""),
    ]
