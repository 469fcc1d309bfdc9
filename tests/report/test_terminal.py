"""What a terminal gets: colours, safe text, progress."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard.report.terminal import Progress, coloured, for_terminal, wants_colour, write

ANSI = re.compile(r"\x1b\[[0-9;]*m")

REPORT = """\
mul in mlp made inf (model.py:7)
  model.py:7: return a * b
  fix: divide a by 8 first (exact)
then dropout in mlp made NaN (model.py:8) of it
note: log in mlp made inf (model.py:3), but it reached no output

Detected inf/nan during batch_number=0
Last 2 forward frames:
abs min  abs max  metadata
                  mlp Linear
1.00e+00 2.00e+00 weight
             None input[mask]
                  mlp mul  # model.py:7: return a * b
0.00e+00 4.54e+02 input[0]
0.00e+00      inf output"""

COLOURED = """\
<bold><red>mul in mlp made inf (model.py:7)<end>
  model.py:7: return a * b
<green>  fix: divide a by 8 first (exact)<end>
<cyan>then dropout in mlp made NaN (model.py:8) of it<end>
<cyan>note: log in mlp made inf (model.py:3), but it reached no output<end>

<dim>Detected inf/nan during batch_number=0<end>
<dim>Last 2 forward frames:<end>
<dim>abs min  abs max  metadata<end>
<bold>                  mlp Linear<end>
1.00e+00 2.00e+00 weight
             None input[mask]
<bold>                  mlp mul<end><cyan>  # model.py:7: return a * b<end>
0.00e+00 4.54e+02 input[0]
<red>0.00e+00      inf output<end>"""

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36", "end": "0"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_report() -> None:
    wanted = re.sub("<([a-z]+)>", lambda found: f"\x1b[{CODES[found[1]]}m", COLOURED)
    assert coloured(REPORT) == wanted
    assert coloured("fine\nmore", healthy=True) == "\x1b[1m\x1b[32mfine\x1b[0m\nmore"


printable = st.text(
    st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"], include_characters="\n\t")
)


@settings(max_examples=200, database=None, deadline=None)
@given(printable)
def test_colours_change_no_character(text: str) -> None:
    assert ANSI.sub("", coloured(text)) == text
    assert ANSI.sub("", coloured(f"{REPORT}\n{text}")) == f"{REPORT}\n{text}"


@settings(max_examples=200, database=None, deadline=None)
@given(st.text())
def test_what_would_be_a_command_is_shown(text: str) -> None:
    """No control character of the text reaches a terminal, coloured or not."""
    for shown in (coloured(text), for_terminal(text, Terminal())):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ANSI.sub("", shown))
        shown.encode()
    assert coloured("ok\n\x1b]0;title\x07") == "\x1b[1m\x1b[31mok\x1b[0m\n\\x1b]0;title\\x07"
    assert for_terminal(text, io.StringIO()) == text


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # as no-color.org has it
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_who_gets_colours(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal() if terminal else io.StringIO()) is expected


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is written over and gone at the end; nothing of what is quick."""
    clock = iter([0.0, 0.05, 0.2, 0.25, 0.4, 0.4])
    monkeypatch.setattr(
        "fxguard.report.terminal.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    stream = Terminal()
    with Progress(stream, "reading x") as progress:
        for share in (0.1, 0.2, 0.3, 1.0):
            progress.advance(share)
    assert stream.getvalue() == "\rreading x  20%\rreading x 100%\r" + " " * 14 + "\r"
    silent = io.StringIO()
    with Progress(silent, "reading x") as progress:
        progress.advance(0.5)  # asks no clock
    assert silent.getvalue() == ""


def test_progress_on_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is gone, one that is narrow, one that is closed, none at all."""
    monkeypatch.setattr("fxguard.report.terminal.PERIOD", 0)

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Progress(Gone(), "reading x") as progress:
        progress.advance(0.5)
    narrow = Terminal()
    with Progress(narrow, "reading " + "x" * 200) as progress:
        progress.advance(0.5)
    assert all(len(line) < 80 for line in narrow.getvalue().split("\r"))
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        with Progress(stream, "reading x") as progress:  # type: ignore[arg-type]
            progress.advance(0.5)


SCRIPT = """
import torch, fxguard
class Net(torch.nn.Module):
    def forward(self, x):
        return x.exp()
try:
    fxguard.instrument(Net())(torch.full((3,), 1e4))
except fxguard.NonFiniteError:
    pass
"""


def on_a_terminal(script: Path, **environment: str) -> str:
    """What a program writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(script)]
    env = {**os.environ, "TERM": "xterm", **environment}
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env, check=True)
    os.close(theirs)
    said = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the end
            chunk = b""
        if not chunk:
            os.close(ours)
            return said.decode().replace("\r\n", "\n")
        said += chunk


@pytest.mark.slow
def test_a_real_terminal(tmp_path: Path) -> None:
    """A report in colours there, without them where somebody said so or a pipe reads it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    colours = on_a_terminal(script)
    assert "\x1b[31mexp made inf (train.py:5): overflow\x1b[0m" in colours
    plain = on_a_terminal(script, NO_COLOR="1")
    assert plain == ANSI.sub("", colours)
    piped = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    assert piped.stderr == plain


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "ü \\ud800 mul"), ("ascii", "\\xfc \\ud800 mul"), (None, "ü \\ud800 mul")],
)
def test_what_an_encoding_lacks_is_an_escape(encoding: str | None, shown: str) -> None:
    """A trace of somebody else's may hold half of a surrogate pair, which nothing can write."""
    stream = io.StringIO() if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding)
    assert for_terminal("ü \ud800 mul", stream) == shown
    write("ü \ud800 mul", stream)
    stream.seek(0)
    assert stream.read() == f"{shown}\n"
