"""What a notebook and rich show of a result: its verdict, its page in a frame, a table.

A page in a notebook is a frame of its own: its scripts reach nothing of the notebook, and nothing
of the notebook changes how it looks. Viewers that take out frames and styles show the verdict and
the table. Knows nothing of torch.
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

# What a page may add to a notebook, which is a file that is kept, and read as a whole. The script
# of a page is a fifth of that, and a page of a whole T5 a third.
MOST_CHARACTERS = 500_000
# A page of more rows than that is larger, so it is not made to find that out.
MOST_ROWS = 20_000

# On white and on the dark grey of a notebook alike.
RED, GREEN = "#d73a3f", "#1f883d"


@dataclass(frozen=True, slots=True)
class Display:
    """What is to be shown of a result, wherever it is shown."""

    verdict: Sequence[str]  # lines, the first is the headline
    _: KW_ONLY
    healthy: bool  # whether the headline is good news
    above: Sequence[str] = ()  # what the result is about
    below: str = ""  # the rest of the text
    table: Callable[[], str] | None = None  # makes HTML
    of_table: str = "The same as a table"
    page: Callable[[], str] | None = None  # makes the text of the page; None where there is none
    rows: int = 0  # of the page
    name: str = "result"  # as in report.to_html("report.html")

    @property
    def text(self) -> str:
        """What stands in the place of a page where there is only text."""
        return "\n\n".join(filter(None, ["\n".join(self.above), "\n".join(self.verdict)]))

    def html(self) -> str:
        """The verdict, the page in a frame of its own, and the table.

        Without a page, or with one that is too large for a notebook, the table is open.
        """
        page = self._page()
        table = "" if self.table is None else self.table()
        parts = [self._verdict_html()]
        if page is not None:
            parts.append(_frame(page))
        elif self.page is not None:
            code = f'{self.name}.to_html("{self.name}.html")'
            parts.append(f"<p>Too large for a notebook: <code>{code}</code> writes the page.</p>")
        if page is not None and table:
            table = f"<details><summary>{self.of_table}</summary>{table}</details>"
        parts.append(table)
        text = "\n".join(filter(None, parts))
        return text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half a surrogate pair

    def rich(self) -> Text:
        """For rich, in the colours that a terminal gets. Lines wrap where the console ends."""
        from rich.text import Text

        verdict = coloured("\n".join(self.verdict), healthy=self.healthy)
        parts = [_without_headline(self.above), verdict, _without_headline([self.below])]
        return Text.from_ansi("\n\n".join(filter(None, parts)))

    def _page(self) -> str | None:
        if self.page is None or self.rows > MOST_ROWS:
            return None
        text = self.page()
        return text if len(text) <= MOST_CHARACTERS else None

    def _verdict_html(self) -> str:
        colour = GREEN if self.healthy else RED
        above = "".join(f"<div>{html.escape(line)}</div>" for line in self.above if line)
        # All that is not our own is escaped: these are our tags.
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
        """IPython writes that into a notebook too, beside the HTML: not every field of it all."""
        printer.text(self._display().text)

    def __rich__(self) -> Text:
        return self._display().rich()


def page_of(result: Displayed) -> str:
    """The text of the page that ``to_html`` of a result writes.

    Raises:
        UsageError: when there is nothing to show on a page.
    """
    make = result._display().page
    if make is None:
        raise UsageError(f"a {type(result).__name__} without frames has no page")
    return make()


def _without_headline(lines: Sequence[str]) -> str:
    """In colours, and the first line as any other."""
    return coloured("\n".join(["", *lines])).removeprefix("\n")


def _frame(page: str) -> str:
    source = html.escape(framed(page))
    return (
        f'<iframe title="Chart, modules and frames" sandbox="allow-scripts" width="100%" '
        f'height="{HEIGHT}" style="border: 1px solid #8888" srcdoc="{source}"></iframe>'
    )
