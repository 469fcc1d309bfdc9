"""What pages of docs/ show on a command line: files to save, commands, and what they print."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.programs import run_python

__all__ = ["Command", "blocks_of", "commands_of", "files_of", "is_as_shown", "run"]

ROOT = Path(__file__).resolve().parents[2]
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
