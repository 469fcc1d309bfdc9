"""Take the picture of a terminal that README.md shows: the demo without fxguard, and with it.

python docs/images/terminal.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURE = Path(__file__).with_name("terminal.svg")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDTH = 100  # characters
COMMANDS = (("python", "train.py"), ("fxguard", "run", "train.py"))
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        *((72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)),
    ],
)
# What a reader of the picture would otherwise be asked to load from somewhere.
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def printed(*command: str) -> str:
    """What a program says, as a terminal gets it; of a report the verdict alone."""
    python = [sys.executable] if command[0] == "python" else [sys.executable, "-m", command[0]]
    done = subprocess.run(
        [*python, *command[1:]],
        cwd=EXAMPLES,
        env={**os.environ, "FORCE_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.partition("\n\n")[0].strip("\n")


def screen() -> str:
    """Both commands and what they print, with the codes of colours."""
    lines = []
    for command in COMMANDS:
        lines += [f"\033[1m$ {' '.join(command)}\033[0m", printed(*command)]
    return "\n".join([*lines, "\033[2m… and the frames that led there\033[0m"])


def picture() -> str:
    """The text of the SVG."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(screen()), highlight=False)
    text = console.export_svg(title="examples/train.py", theme=THEME, unique_id="terminal")
    return FONT.sub("", text).replace("Fira Code", "ui-monospace, Menlo, Consolas")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
