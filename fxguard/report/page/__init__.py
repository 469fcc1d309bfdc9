"""Frames as one HTML page that needs no network: chart, module tree, table. Knows no torch.

Everything that comes from a model, its source or a file is data: text in the page is escaped,
numbers and names stand in a JSON block, which the page's own script shows as text. A policy in the
page lets no other script run, by hash, and nothing be loaded.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from importlib import resources

from fxguard.report.frames_json import as_json, collector_paused
from fxguard.report.scripted_page import in_html, one_script, scripted_page
from fxguard.report.sheet import Sheet, page_data
from fxguard.report.text import is_fix, is_why

__all__ = ["framed", "page", "style", "verdict_html"]

# In this order: each uses what stands before it.
MOST_LINES = 7  # of a verdict without a fix, until it is opened
SCRIPTS = ("numbers.js", "chart.js", "batches.js", "tree.js", "table.js", "main.js")


def page(
    title: str,
    verdict: Sequence[str],
    sheets: Sequence[Sheet],
    *,
    meta: str = "",
    healthy: bool = False,
    sides: tuple[str, str] | None = None,
    opens: int = 0,
) -> str:
    """The text of a page.

    Args:
        title: what the page is about.
        verdict: lines, the most important one first.
        sheets: the batches, at least one.
        meta: a line below the title.
        healthy: whether nothing is wrong.
        sides: the names of two traces that are compared.
        opens: index of the batch that the page shows first, which is the one of the verdict.
    """
    with collector_paused():
        data = as_json({**page_data(sheets), "sides": sides, "opens": opens})
    library, script = _asset("uPlot.iife.min.js"), one_script([*map(_asset, SCRIPTS)])
    parts = {
        "TITLE": html.escape(title),
        "META": html.escape(meta),
        "STATE": "healthy" if healthy else "ill",
        "VERDICT": verdict_html(verdict),
        "STYLE": _asset("uPlot.min.css") + _asset("page.css"),
        "DATA": in_html(data),
        "LIBRARY": library,
        "SCRIPT": script,
    }
    return scripted_page(_asset("page.html"), (library, script), parts)


def style() -> str:
    """The style of this page, for others that look like it."""
    return _asset("page.css")


def framed(text: str) -> str:
    """A page for a frame below its verdict: without title, verdict and footer.

    Args:
        text: of the page.
    """
    return text.replace("<body>", '<body class="framed">', 1)


def verdict_html(lines: Sequence[str]) -> str:
    """The headline, and what a reader needs first; the rest opens with a click."""
    first, *more = lines or ("",)
    shown, rest = _lead(more)
    text = f"<p>{html.escape(first)}</p>"
    if shown:
        text += f"<pre>{chr(10).join(map(_line, shown))}</pre>"
    if rest:
        count = f"{len(rest)} more line{'s' if len(rest) > 1 else ''}"
        text += f"<details><summary>{count}</summary><pre>"
        text += f"{chr(10).join(map(_line, rest))}</pre></details>"
    return text


def _lead(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The lines up to the first cause's last fix, with what says why; and all others.

    A verdict without a fix shows as many lines as the screen of a phone has room for.
    """
    fixes = [place for place, line in enumerate(lines) if is_fix(line)]
    if len(lines) <= MOST_LINES or not fixes or fixes[0] >= MOST_LINES:
        return lines[:MOST_LINES], lines[MOST_LINES:]
    end = fixes[0]
    while end + 1 < len(lines) and is_fix(lines[end + 1]):
        end += 1
    shown = [place for place, line in enumerate(lines) if place <= end or is_why(line)]
    rest = [line for place, line in enumerate(lines) if place not in shown]
    return [lines[place] for place in shown], rest


def _line(line: str) -> str:
    escaped = html.escape(line)
    return f"<strong>{escaped}</strong>" if is_fix(line) else escaped


@cache
def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")
