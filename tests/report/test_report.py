"""A report as text, tables and HTML, against texts written by hand from the specification."""

from __future__ import annotations

import dataclasses
import html.parser
import math
from typing import Any

import pytest

from fxguard.findings import Origin
from fxguard.records import Frame, Row, Source
from fxguard.types import Report
from support.t5_overflow import BLOCK, GOLDEN, LINE, MUL, REPORT

INF = math.inf


def test_text_is_the_verdict_and_the_classic_frames() -> None:
    """The verdict comes first; below it the frames read as in the specification, to the blank."""
    assert str(REPORT) == GOLDEN


def test_message_names_rank_batch_operation_and_line() -> None:
    """The message of the error is one line; the rank is told where there is one."""
    line = f"batch 0: mul in {BLOCK} made inf and -inf (modeling_t5.py:109)"
    assert REPORT.message == line
    assert dataclasses.replace(REPORT, rank=1).message == f"rank 1: {line}"


def test_github_table_has_one_line_for_each_row() -> None:
    """A GitHub table holds head, rule, and a line of six cells for each row of each frame."""
    head, rule, *lines = REPORT.to_table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        *("module", "kind", "value"),
        *("abs min", "abs max", "source"),
    ]
    assert set(rule) == {"|", "-"}
    assert cells[0] == [f"{BLOCK}.wi_1", "Linear", "weight", "7.21e-06", "2.64e+00", str(LINE)]
    assert cells[-1] == [BLOCK, "mul", "output", "0.00e+00", "inf", str(LINE)]
    assert len(cells) == 6


@pytest.mark.parametrize("tablefmt", ["simple", "plain", "grid", "pipe", "rst", "tsv", "html"])
def test_every_format_of_tabulate_shows_every_number(tablefmt: str) -> None:
    """Whatever the format, each module, label and number is in the table as it was written."""
    table = REPORT.to_table(tablefmt)
    for frame in REPORT.frames:
        assert frame.name in table
        for row in frame.rows:
            assert row.label in table
            assert f"{row.abs_max:.2e}" in table
    assert "6.55e+04" not in table


def test_bar_in_the_source_does_not_break_the_github_table() -> None:
    """A bar in the user's line makes no seventh cell."""
    line = Source("a.py", 1, "mask = padding | causal")
    report = Report(0, (dataclasses.replace(MUL, source=line),), ())
    last = report.to_table("github").splitlines()[-1]
    assert last.replace("\\|", "").count("|") == 7


class Tags(html.parser.HTMLParser):
    """Collects the elements and the text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_escapes_everything_from_outside() -> None:
    """Code, names and labels of the user are text, whatever they hold."""
    hostile = "<script>alert('x')</script><img src=x onerror=alert(1)>&amp;"
    source = Source(f"/a/{hostile}.py", 1, hostile)
    frame = Frame(hostile, hostile, True, (Row(hostile, 0.0, INF), Row("x", note=hostile)), source)
    report = Report(0, (frame,), (Origin(frame, "inf", hostile, hostile),))
    document = Tags(report._repr_html_())
    of_text = {"div", "p", "strong", "pre", "details", "summary"}
    assert document.tags <= of_text | {"iframe", "table", "thead", "tbody", "tr", "th", "td"}
    assert hostile in document.text


def test_html_shows_the_verdict_and_the_table() -> None:
    """A notebook shows what was found and every number, as elements."""
    document = Tags(REPORT._repr_html_())
    assert {"pre", "table", "td"} <= document.tags
    assert f"mul in {BLOCK} made inf and -inf (modeling_t5.py:109)" in document.text
    assert "7.21e-06" in document.text
