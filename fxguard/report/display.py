"""How notebooks and rich show a result: its verdict, its page in a frame, a table.

A page in a notebook has its own frame: its scripts cannot reach the notebook, and the notebook does
not change its appearance. Viewers that remove frames and styles show the verdict and the table.
Knows nothing of torch.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from fxguard.errors import UsageError
from fxguard.report.page import framed, verdict_html
from fxguard.report.terminal import coloured

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["SHOWN", "Display", "Displayed", "page_of"]

SHOWN = 20  # rows of a table
HEIGHT = 640  # pixels: the chart, and below it the first modules and frames

# The limit for what a page adds to a notebook, a file that is kept and read as a whole. The script
# of a page takes a fifth of it, and the page of a whole T5 a third.
MOST_CHARACTERS = 500_000
# A page with more rows is certainly larger, so it is not even made.
MOST_ROWS = 20_000

# Readable on white and on the dark grey of a notebook.
RED, GREEN = "#d73a3f", "#1f883d"


@dataclass(frozen=True, slots=True)
class Display:
    """The parts of a result to show, wherever it is shown."""

    verdict: Sequence[str]  # lines, the first is the headline
    _: KW_ONLY
    healthy: bool  # whether the headline is good news
    above: Sequence[str] = ()  # what the result is about
    below: str = ""  # the rest of the text
    table: Callable[[], str] | None = None  # makes HTML
    of_table: str = "The same as a table"
    page: Callable[[], str] | None = None  # makes the text of the page; None if there is none
    framed: bool = True  # False: in a notebook, such a page shows no more than verdict and table
    rows: int = 0  # of the page
    name: str = "result"  # as in report.to_html("report.html")

    @property
    def text(self) -> str:
        """The replacement for a page where only text can be shown."""
        return "\n\n".join(filter(None, ["\n".join(self.above), "\n".join(self.verdict)]))

    def html(self) -> str:
        """The verdict, the page in its own frame, and the table.

        Without a page, or if it is too large for a notebook, the table is open.
        """
        page = self._page()
        table = "" if self.table is None else self.table()
        parts = [self._verdict_html()]
        if page is not None:
            parts.append(_frame(page))
        elif self.page is not None and self.framed:
            code = f'{self.name}.to_html("{self.name}.html")'
            parts.append(f"<p>Too large for a notebook: <code>{code}</code> writes the page.</p>")
        if page is not None and table:
            table = f"<details><summary>{self.of_table}</summary>{table}</details>"
        parts.append(table)
        text = "\n".join(filter(None, parts))
        return text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half a surrogate pair

    def rich(self) -> Text:
        """The text for rich, in the colours of a terminal. Lines wrap at the console's edge."""
        from rich.text import Text

        verdict = coloured("\n".join(self.verdict), healthy=self.healthy)
        parts = [_without_headline(self.above), verdict, _without_headline([self.below])]
        return Text.from_ansi("\n\n".join(filter(None, parts)))

    def _page(self) -> str | None:
        if self.page is None or not self.framed or self.rows > MOST_ROWS:
            return None
        text = self.page()
        return text if len(text) <= MOST_CHARACTERS else None

    def _verdict_html(self) -> str:
        colour = GREEN if self.healthy else RED
        above = "".join(f"<div>{html.escape(line)}</div>" for line in self.above if line)
        # Everything except our own tags is escaped.
        verdict = (
            verdict_html(self.verdict)
            .replace("<p>", f'<p style="color: {colour}; font-weight: bold; margin: 0">')
            .replace("<strong>", f'<strong style="color: {GREEN}">')
            .replace(
                "<pre>",
                '<pre style="font-family: monospace; white-space: pre-wrap; margin: 0.4em 0 0">',
            )
        )
        style = f"border-left: 4px solid {colour}; padding: 0.2em 0.9em; margin: 0.4em 0"
        return f'<div style="{style}">{above}{verdict}</div>'


class Displayed:
    """A result that notebooks, IPython and rich show: they call these methods."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # IPython takes a class's own `__repr__`, which a dataclass has, before what it inherits.
        cls._repr_pretty_ = Displayed._repr_pretty_  # type: ignore[method-assign]

    def _display(self) -> Display:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._display().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython also writes this into a notebook, next to the HTML, so it omits most fields."""
        printer.text(self._display().text)

    def __rich__(self) -> Text:
        return self._display().rich()


def page_of(result: Displayed) -> str:
    """The text of the page that a result's ``to_html`` writes.

    Raises:
        UsageError: when there is nothing to show on a page.
    """
    make = result._display().page
    if make is None:
        raise UsageError(f"a {type(result).__name__} without frames has no page")
    return make()


def _without_headline(lines: Sequence[str]) -> str:
    """The text in colours, with the first line like any other."""
    return coloured("\n".join(["", *lines])).removeprefix("\n")


def _frame(page: str) -> str:
    source = html.escape(framed(page))
    return (
        f'<iframe title="Chart, modules and frames" sandbox="allow-scripts" width="100%" '
        f'height="{HEIGHT}" style="border: 1px solid #8888" srcdoc="{source}"></iframe>'
    )
