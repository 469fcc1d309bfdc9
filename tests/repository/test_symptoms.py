"""The pages of docs/symptoms/: each command runs, and prints what the page shows."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.programs import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "symptoms").glob("*.md"))}
BLOCK = re.compile(r"^```(?P<info>[^\n]+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'python title="([^"]+)"')
PYTHON = {  # a command that a reader types: what runs it here, whatever is on the path
    "python": [],
    "fxguard": ["-m", "fxguard"],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


@dataclass(frozen=True)
class Command:
    """One ``$`` line of a page."""

    line: str  # without the dollar
    shown: str  # what the page shows below it; a line `...` stands for lines that are left out


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The info string and the text of each block of a page."""
    return [(block["info"], block["text"]) for block in BLOCK.finditer(page)]


def files_of(page: str) -> dict[str, str]:
    """The blocks that have a title, by it: a reader saves each under this name."""
    titles = [(TITLE.fullmatch(info), text) for info, text in blocks_of(page)]
    return {title[1]: text for title, text in titles if title is not None}


def commands_of(page: str) -> list[Command]:
    """The ``$`` lines of the ``console`` blocks, each with the lines below it."""
    found = []
    for info, text in blocks_of(page):
        if info == "console":
            before, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
            assert not before, f"{before!r} stands above the first command"
            found += [Command(*part.split("\n", 1)) for part in parts]
    return found


def run(line: str, folder: Path) -> str:
    """What a command of a page prints in a folder, stdout and stderr as they come."""
    words = line.split()
    variables = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    argv = [*PYTHON[words[0]], *words[1:]]
    if words[0] != "torchrun" and words == line.split():  # variables are for a new Python
        return run_python(folder, *argv, env=variables, as_one=True).stdout
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether a command printed the lines that are shown, and others only where `...` stands."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


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
