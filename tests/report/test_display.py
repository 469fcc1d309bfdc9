"""What notebooks, IPython and rich show of a result."""

from __future__ import annotations

import html
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fxguard
from fxguard import diff
from fxguard.comparison.elements import Compared
from fxguard.comparison.result import Comparison
from fxguard.findings import Origin
from fxguard.report.display import MOST_CHARACTERS, SHOWN, page_of
from fxguard.report.forecast import Forecast, ForecastRow
from fxguard.report.precision_plan import PrecisionPlan
from fxguard.report.self_test import SelfTest
from fxguard.report.terminal import coloured
from fxguard.testing import Deviation, Overflow, Stability
from fxguard.types import Frame, Row, Trace, TracedBatch
from support.needs import needs
from support.t5_overflow import REPORT

FRAMES = REPORT.frames
HEALTHY = TracedBatch(6, FRAMES[:1])
FOUND = TracedBatch(7, FRAMES, None, tuple(REPORT.verdict), (1,))
TRACE = Trace("T5", None, "2.13.0", (HEALTHY, FOUND))
DIFF = diff(FRAMES[:1], [Frame("x", "Linear", False, (Row("output", 0.0, 8.0),))])
FAILS = ForecastRow(
    operation="mul", problem="overflow", dtype="float16", needed=1e6, share=0.0, error=0.0
)
FORECAST = Forecast("float16", (FAILS,), 2, frames=FRAMES)
PLAN = PrecisionPlan(
    *("float16", "model.half()", ("decoder.*:mul",), 1, 2, True),
    *(1e-3, math.nan, 1e-3, math.inf, 1e-7, 4),
)
COMPARISON = Comparison("A", "B", (Compared("a mul", kind="mul"),), (), (), (), DIFF)
SELFTEST = SelfTest(3, 3, 1, (), (("between graphs", 2),))
STABILITY = Stability(torch.float16, torch.float64, 0.03, (Deviation("mul", 0.5, 1e-3),))
OVERFLOW = Overflow(torch.ones(2), REPORT, 7, 54)
FRAMED = (REPORT, TRACE, DIFF, COMPARISON, FORECAST, STABILITY, OVERFLOW)
ALL = (*FRAMED, PLAN, SELFTEST)


def name_of(result: Any) -> str:
    return type(result).__name__


class Read(HTMLParser):
    """The text of a document, that of its strong elements, and its frames."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.strong: list[str] = []
        self.frames: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "iframe":
            self.frames.append(dict(attrs)["srcdoc"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "strong" in self.open:
            self.strong.append(data)


@pytest.mark.parametrize("result", ALL, ids=name_of)
def test_a_notebook_shows_the_verdict(result: Any) -> None:
    """Line by line, with what to do standing out."""
    lines = getattr(result, "verdict", str(result).splitlines())
    shown = Read(result._repr_html_())
    at = [shown.text.index(line) for line in lines]
    assert at[0] == min(at)
    assert shown.strong == [line for line in lines if line.startswith(("  fix: ", "  or: "))]


@pytest.mark.parametrize("result", FRAMED, ids=name_of)
def test_a_notebook_holds_the_page(result: Any, tmp_path: Path) -> None:
    """In a frame, as ``to_html`` writes it, but for the class by which it hides the verdict."""
    result.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page_of(result) == page
    [frame] = Read(result._repr_html_()).frames
    assert frame == page.replace("<body>", '<body class="framed">')
    assert ".framed header .verdict" in page or ".framed .verdict" in page


@pytest.mark.parametrize("result", [PLAN, SELFTEST], ids=name_of)
def test_a_page_that_says_no_more_is_in_no_frame(result: Any, tmp_path: Path) -> None:
    """A plan shows the change of code, a self-test its verdict; the page is there for a file."""
    document = result._repr_html_()
    assert Read(document).frames == []
    assert "Too large" not in document
    assert getattr(result, "advice", "") in Read(document).text
    result.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page_of(result)


def test_what_has_no_page() -> None:
    """A forecast from a file, and an empty trace, show a table."""
    for result in (Trace("T5", None, "2.13.0", ()), Forecast("float16", (FAILS,), 2)):
        assert Read(result._repr_html_()).frames == []
        assert "Too large" not in result._repr_html_()
        with pytest.raises(fxguard.FxguardError, match="without frames has no page"):
            page_of(result)


def deep(operations: int, batches: int = 1) -> Trace:
    row = Row("output", 1e-3, 2.0, dtype="bfloat16")
    frames = tuple(Frame(f"layers.{i // 100}", "mul", True, (row,)) for i in range(operations))
    found = tuple(TracedBatch(number, frames) for number in range(batches))
    return Trace("Deep", None, "2.13.0", found)


def test_a_notebook_stays_small() -> None:
    """Twenty thousand operations, or a thousand batches: the verdict, a table, and what to call."""
    assert len(page_of(deep(20_000))) > MOST_CHARACTERS
    for trace in (deep(20_000), deep(20_001), deep(100, batches=1000)):
        document = trace._repr_html_()
        assert len(document) < 10_000
        shown = Read(document)
        assert shown.frames == []
        assert trace.verdict[0] in shown.text
        assert 'trace.to_html("trace.html") writes the page' in shown.text
        assert document.count("<tr>") == min(len(trace.batches), SHOWN) + 1
    many = fxguard.types.Report(0, deep(20_000).batches[0].frames, ())
    assert len(many._repr_html_()) < 10_000
    assert len(Read(deep(100)._repr_html_()).frames) == 1


def test_the_table_of_a_trace_has_the_batch_of_the_verdict() -> None:
    batches = (*deep(1, batches=90).batches, TracedBatch(90, FRAMES, None, ("it broke",)))
    document = Read(Trace("Net", None, "2.13.0", batches)._repr_html_())
    assert "it broke" in document.text.partition("The batches as a table")[2]


def test_a_mark_of_ours_in_a_name_is_text() -> None:
    """The styles are put into our own tags only."""
    text = "<p> <strong> <body> </iframe> </details>"
    frame = Frame(text, text, True, (Row("output", 0.0, math.inf),))
    report = fxguard.types.Report(0, (frame,), (Origin(frame, "inf", text, text),))
    document = report._repr_html_()
    assert text in Read(document).text
    assert html.escape(text) in document


@pytest.mark.parametrize("result", ALL, ids=name_of)
def test_ipython_shows_text_and_html(result: Any) -> None:
    """A notebook file holds the verdict as text, and not a representation of every field."""
    formatters = needs("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(result)
    assert data.keys() == {"text/plain", "text/html"}
    assert data["text/html"] == result._repr_html_()
    lines = getattr(result, "verdict", str(result).splitlines())
    assert data["text/plain"].endswith("\n".join(lines))
    assert len(data["text/plain"]) < 2000


def in_rich(result: Any, **options: Any) -> str:
    console = needs("rich.console").Console(
        file=io.StringIO(), width=200, no_color=False, **options
    )
    console.print(result)
    return str(console.file.getvalue())


COLOURS = re.compile(r"\x1b\[([0-9;]*)m")


def styled(text: str) -> list[tuple[str, str]]:
    """Each character with the colours it has."""
    found, now, at = [], "", 0
    for code in COLOURS.finditer(text):
        found += [(char, now) for char in text[at : code.start()]]
        now = "" if code[1] == "0" else ";".join(filter(None, (now, code[1])))
        at = code.end()
    return found + [(char, now) for char in text[at:]]


def test_rich_prints_a_report_in_our_colours() -> None:
    """Character by character those of a terminal: the headline, fixes, titles, bad numbers."""
    found = in_rich(REPORT, force_terminal=True, color_system="standard")
    assert styled(found) == styled(coloured(str(REPORT)) + "\n")
    assert "\x1b[31m" in found.splitlines()[-1]  # the number that is infinite
    assert in_rich(REPORT) == f"{REPORT}\n"  # no terminal, no colours


@pytest.mark.parametrize("result", ALL, ids=name_of)
def test_rich_prints_every_result(result: Any) -> None:
    """The headline is green where it is good news; markup in names is text."""
    lines = getattr(result, "verdict", str(result).splitlines())
    found = in_rich(result, force_terminal=True, color_system="standard")
    assert lines[0] in COLOURS.sub("", found)
    colour = 32 if result in (PLAN, COMPARISON, SELFTEST) else 31
    assert f"\x1b[1;{colour}m{lines[0]}\x1b[0m" in found
    healthy = Trace("[red]Net[/red]", None, "2.13.0", (HEALTHY,))
    found = in_rich(healthy, force_terminal=True, color_system="standard")
    assert found.startswith(f"[red]Net[/red]\n\n\x1b[1;32m{healthy.verdict[0]}\x1b[0m\n")


def test_rich_obeys_no_name() -> None:
    """Control characters are escapes, as on a terminal."""
    frame = Frame("a\x1b]0;title\x07", "mul", True, (Row("output", 0.0, math.inf),))
    report = fxguard.types.Report(0, (frame,), (Origin(frame, "inf", "a\x1b[2J", "output"),))
    found = in_rich(report, force_terminal=True, color_system="standard")
    assert COLOURS.sub("", found).isprintable() is False  # newlines
    assert "\x1b" not in COLOURS.sub("", found)
    assert "\x07" not in found
    assert r"a\x1b]0;title\x07" in found


def test_no_line_is_cut() -> None:
    """On a narrow console, where lines wrap."""
    console = needs("rich.console").Console(file=io.StringIO(), width=30)
    console.print(REPORT)
    assert re.sub(r"\s", "", console.file.getvalue()) == re.sub(r"\s", "", str(REPORT))
