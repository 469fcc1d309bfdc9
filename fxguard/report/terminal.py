"""Text for a terminal: colours, escapes, and progress. Knows nothing of torch."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TextIO

from fxguard.forgiving import where_theirs_may_raise
from fxguard.report.text import is_fix

__all__ = [
    "Progress",
    "coloured",
    "escaped",
    "for_terminal",
    "is_terminal",
    "wants_colour",
    "write",
]

RED, GREEN, CYAN = "\033[31m", "\033[32m", "\033[36m"
BOLD, DIM, END = "\033[1m", "\033[2m", "\033[0m"

# The parts of a report's lines, see `text.frame_text` and `text.row_text`.
TITLE = re.compile(r"^( {18}\S.*?)(  # .*)?$")
ROW = re.compile(r"^ *(?P<low>\S+) +(?P<high>\S+) (?P<label>.*)$")
HEADS = ("Detected inf/nan during ", "Detected underflow during ", "Last ", "abs min ")
BAD = ("inf", "nan")

# Characters that a terminal obeys or shows in another order (Unicode's directional formatting), and
# halves of surrogate pairs, which no encoding can write.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

PERIOD = 0.1  # seconds between two updates of a progress line


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which lines can be overwritten."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour text on a stream.

    True on a terminal, unless ``NO_COLOR`` is set to anything (https://no-color.org); elsewhere
    only if ``FORCE_COLOR`` is set.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def for_terminal(text: str, stream: TextIO, *, healthy: bool = False) -> str:
    r"""A report for a stream: coloured, with control characters escaped, or unchanged.

    Characters that the stream's encoding lacks become escapes, such as ``\u2028``.

    Args:
        text: ``str(report)``, a verdict or a trace.
        stream: where it will be written. A file or a pipe gets the unchanged text.
        healthy: whether the first line is good news, and green.
    """
    if wants_colour(stream):
        text = coloured(text, healthy=healthy)
    elif is_terminal(stream):
        text = escaped(text)
    return _encodable(text, stream)


def escaped(text: str, stream: TextIO | None = None) -> str:
    r"""Text whose control characters are escapes, such as ``\x1b``.

    For what comes out of files of others, wherever it is written: a pipe may end at a terminal.

    Args:
        text: the text.
        stream: where it will be written; characters that its encoding lacks become escapes, too.
    """
    text = CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text if stream is None else _encodable(text, stream)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write(text: str, stream: TextIO | None, *, flush: bool = False) -> None:
    """Write lines to a stream, with colours if it shows them. It never raises.

    A report that cannot be written must not replace the exception that it belongs to. The stream
    may be closed, or a pipe without a reader, or its encoding may lack a character of the model's
    source; such characters are written as escapes.

    Args:
        text: ``str(report)``, a verdict or a trace, without the newline at its end.
        stream: where to write; None in a program without a console.
        flush: whether to flush the stream afterwards.
    """
    if stream is None:
        return
    # Somebody may have put any object there, even one without these methods.
    with contextlib.suppress(AttributeError), where_theirs_may_raise():  # such as a closed one
        stream.write(for_terminal(text, stream) + "\n")
        if flush:
            stream.flush()


def coloured(text: str, *, healthy: bool = False) -> str:
    r"""The text of a report with colours: the verdict, titles, and what is bad.

    Control characters in a model's names or in a trace would be commands to the terminal; they are
    shown as escapes, such as ``\x1b``.

    Args:
        text: ``str(report)``, a verdict or a trace.
        healthy: whether the first line is good news, and green.

    Example:
        >>> print(coloured(str(guard.last_report)))
    """
    first, *rest = escaped(text).split("\n")
    if first and not TITLE.match(first):
        first = f"{BOLD}{GREEN if healthy else RED}{first}{END}"
    return "\n".join([first, *map(_line, rest)])


def _line(line: str) -> str:
    if line.startswith(HEADS):
        return f"{DIM}{line}{END}"
    if line.startswith(("note: ", "then ")):
        return f"{CYAN}{line}{END}"
    if is_fix(line):
        return f"{GREEN}{line}{END}"
    if title := TITLE.match(line):
        name, source = title.groups()
        return f"{BOLD}{name}{END}" + (f"{CYAN}{source}{END}" if source else "")
    row = ROW.match(line)
    if row and (row["low"] in BAD or row["high"] in BAD):
        return f"{RED}{line}{END}"
    return line


class Progress:
    """One progress line on a terminal; nothing if the stream is not a terminal.

    Each update overwrites the line, and the end erases it. Work of less than a tenth of a second
    shows nothing.

    Args:
        stream: where to write; ``sys.stderr`` leaves the output of a program alone.
        what: the work, "reading traces/T5-0.jsonl".

    Example:
        >>> with Progress(sys.stderr, "reading") as progress:
        ...     for number, line in enumerate(lines, 1):
        ...         read(line)
        ...         progress.advance(number / len(lines))
    """

    def __init__(self, stream: TextIO, what: str) -> None:
        self.stream, self.what = stream, escaped(what)
        self._shows = is_terminal(stream)
        self._last = time.monotonic()
        self._width = 0

    def advance(self, share: float) -> None:
        """Show the share of the work done so far, from 0 to 1."""
        if not self._shows or (now := time.monotonic()) - self._last < PERIOD:
            return
        self._last = now
        room = self._columns() - len(" 100%") - 1  # a wrapped line could not be erased
        self._write(f"{self.what[: max(room, 0)]} {share:4.0%}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.erase()

    def erase(self) -> None:
        """Erase the line, if there is one."""
        if self._width:
            self._write("")  # blanks over the line,
            self._write("")  # and back to its beginning

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, line: str) -> None:
        try:
            self.stream.write(f"\r{line}{' ' * (self._width - len(line))}")
            self.stream.flush()
        except (OSError, ValueError):  # harmless: the terminal is gone, or cannot write a name
            self._shows = False
        self._width = len(line)
