"""HTML pages, in a real browser."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import diff, load_trace
from fxguard.findings import Origin
from fxguard.records import RowRole
from fxguard.types import Diff, Frame, Report, Row, Source, Trace, TracedBatch
from support.needs import needs
from support.t5_overflow import REPORT

pytestmark = pytest.mark.slow

INF, NAN = math.inf, math.nan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).exp()
        return self.second(hidden * hidden)


X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Three batches, each with larger inputs."""
    folder = tmp_path_factory.mktemp("traces")
    model = fxguard.instrument(Net(), trace_batch_nums=range(3), trace_to=folder)
    for scale in (1.0, 10.0, 30.0):
        model(X * scale)
    return load_trace(folder / "Net-0.jsonl")


@pytest.fixture(scope="module")
def report() -> Report:
    model = fxguard.instrument(Net(), on_detect=lambda report: None)
    model(X * 200)
    found = fxguard.guard_of(model).last_report
    assert found is not None
    return found


def test_a_page_shows_the_cause_and_the_fix(show: Any, tmp_path: Path) -> None:
    """In the verdict, where the fix stands out, and with the frame that is blamed."""
    REPORT.to_html(tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    origin, fix = REPORT.origins[0], f"fix: {REPORT.origins[0].fixes[0]}"
    assert page.inner_text("header .verdict p") == f"{origin.message}: overflow"
    assert [s.strip() for s in page.locator("header .verdict strong").all_inner_texts()] == [
        fix,
        f"or: {origin.fixes[1]}",
    ]
    assert f"overflow; {origin.operands}; {fix}" in page.inner_text("#selected")


def test_the_verdict_of_a_batch_shows_its_fix(show: Any, tmp_path: Path) -> None:
    """On a page of several batches, too."""
    batch = TracedBatch(3, REPORT.frames, None, tuple(REPORT.verdict), (1,))
    trace = Trace("T5", None, torch.__version__, (replace(batch, number=2, verdict=()), batch))
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    assert page.locator("#of-batch strong").all_inner_texts()[0].strip().startswith("fix: keep")
    assert page.inner_text("#of-batch pre").split("\n")[:2] == [
        f"  {REPORT.origins[0].frame.source}",
        REPORT.verdict[2],
    ]


def rows_shown(page: Any) -> list[list[str]]:
    """The frames table, without the titles."""
    script = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
    return [r for r in page.eval_on_selector_all("#table tbody tr", script) if len(r) > 1]


def numbers(frames: Any) -> list[list[str]]:
    return [
        [row.label, f"{row.abs_min:.2e}", f"{row.abs_max:.2e}", row.dtype]
        for frame in frames
        for row in frame.rows
    ]


def drawn(page: Any) -> int:
    """How many pixels of the chart are not empty."""
    return int(
        page.evaluate(
            """() => {
            const canvas = document.querySelector("#chart canvas");
            const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return all.data.filter((x, i) => i % 4 === 3 && x > 0).length;
        }"""
        )
    )


def put_mouse(page: Any, index: int, count: int) -> None:
    """Over the chart, where a frame is drawn."""
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * (index + 0.5) / count, box["y"] + box["height"] / 2)


def test_a_report(show: Any, report: Report, tmp_path: Path) -> None:
    """The verdict on top, the frame that is blamed, and every number of the text report."""
    report.to_html(tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    assert page.inner_text("h1") == "Detected inf/nan in batch 0"
    page.click("header .verdict summary")  # the rest opens with a click
    verdict = page.inner_text("header .verdict")
    for line in report.verdict:
        assert re.sub(r"\s+", " ", line.strip()) in re.sub(r"\s+", " ", verdict)
    assert rows_shown(page) == numbers(report.frames)
    assert page.inner_text("#count") == f"{len(report.frames)} frames"
    assert page.inner_text("#selected strong") == report.origins[0].frame.title
    assert drawn(page) > 5000
    assert not page.is_visible("#batches")


def test_hover_and_click(show: Any, trace: Trace, tmp_path: Path) -> None:
    """Hover shows the frame, a click its source line."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    frames = trace.batches[0].frames
    index = next(i for i, frame in enumerate(frames) if frame.kind == "mul")
    assert not page.is_visible("#tip")
    put_mouse(page, index, len(frames))
    page.wait_for_selector("#tip:visible")
    assert page.inner_text("#tip strong") == "mul"
    assert f"{frames[index].rows[-1].abs_max:.2e}" in page.inner_text("#tip")
    assert not page.is_visible("#selected")
    page.mouse.down()
    page.mouse.up()
    source = frames[index].source
    assert source is not None
    assert page.inner_text("#code") == source.code == "return self.second(hidden * hidden)"
    assert f"{source.file}:{source.line}" in page.inner_text("#selected")
    assert page.get_attribute("#table tbody.chosen", "data-index") == str(index)
    page.mouse.move(5, 5)
    page.wait_for_selector("#tip", state="hidden")


def test_the_slider(show: Any, trace: Trace, tmp_path: Path) -> None:
    """Each batch has its numbers; the keyboard moves it."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    assert page.is_visible("#batches")
    for batch in trace.batches:
        assert page.inner_text("#batch-name") == str(batch.number)
        assert rows_shown(page) == numbers(batch.frames)
        page.locator("#batch").press("ArrowRight")
    page.fill("#batch", "1")
    assert rows_shown(page) == numbers(trace.batches[1].frames)
    # What is selected and searched stays.
    page.locator("#chart").press("Home")
    page.locator("#chart").press("Enter")
    page.fill("#search", "mul")
    page.fill("#batch", "2")
    frames = trace.batches[2].frames
    assert rows_shown(page) == numbers(f for f in frames if f.kind == "mul")
    assert page.inner_text("#selected strong") == frames[0].title
    assert f"{frames[0].rows[-1].abs_max:.2e}" in page.inner_text("#selected")


def batches_of(*largest: list[float]) -> Trace:
    """A batch for each list, with the largest magnitudes of its operations."""
    batches = (
        TracedBatch(
            100 + number,
            tuple(
                Frame(f"layers.{i}", "mul", True, (Row("output", 0.0, x, dtype="float16"),))
                for i, x in enumerate(each)
            ),
        )
        for number, each in enumerate(largest)
    )
    return Trace("Net", None, "2.13.0", tuple(batches))


def test_the_map_of_batches(show: Any, tmp_path: Path) -> None:
    """Red where an operation made larger numbers than in most batches; a click goes there."""
    usual = [1.0, 500.0, 2.0, 0.0]
    trace = batches_of(usual, usual, [1.0, 500.0, 32.0, 0.0], usual, [1.0, 50.0, 2.0, INF])
    trace.to_html(tmp_path / "map.html")
    page = show(tmp_path / "map.html")
    canvas = page.locator("#by-batch canvas")
    most = "most at layers.3 mul in batch 104, infinitely larger than in most batches"
    assert canvas.get_attribute("aria-label") == f"Operations by batch: {most}"
    box, plot = canvas.bounding_box(), page.locator("#chart .u-over").bounding_box()

    def place(batch: int, frame: int) -> tuple[float, float]:
        x = plot["x"] - box["x"] + plot["width"] * (frame + 0.5) / 4
        return x, box["height"] * (batch + 0.5) / 5

    script = """(canvas, places) => {
        const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return places.map(([x, y]) => {
            const at = 4 * (Math.floor(y) * canvas.width + Math.floor(x));
            return [...all.data.slice(at, at + 4)];
        });
    }"""
    cells = [(batch, frame) for batch in range(5) for frame in range(4)]
    found = dict(zip(cells, canvas.evaluate(script, [place(*cell) for cell in cells]), strict=True))
    assert {at for at, (red, _, blue, alpha) in found.items() if alpha and red > blue} == {
        (2, 2),
        (4, 3),
    }
    assert {at for at, (red, _, blue, alpha) in found.items() if alpha and blue > red} == {(4, 1)}
    x, y = place(2, 2)
    canvas.hover(position={"x": x, "y": y})
    assert (
        page.inner_text("#tip") == "layers.2 mul\nbatch 102: 16.0 times larger than in most batches"
    )
    canvas.click(position={"x": x, "y": y})
    assert page.inner_text("#batch-name") == "102"
    assert page.inner_text("#selected strong") == "layers.2 mul"
    assert "3.20e+01" in page.inner_text("#selected")
    batches_of(usual, usual[:3]).to_html(tmp_path / "other.html")
    assert not show(tmp_path / "other.html").is_visible("#by-batch")
    diff(trace, trace).to_html(tmp_path / "diff.html")
    assert not show(tmp_path / "diff.html").is_visible("#by-batch")


def test_nothing_is_lost_between_pixels(show: Any, tmp_path: Path) -> None:
    """One of ten thousand operations is larger in one batch: the map shows it."""
    usual = [1.0] * 10_000
    trace = batches_of(usual, usual, [*usual[:6_003], 64.0, *usual[6_004:]])
    trace.to_html(tmp_path / "map.html")
    page = show(tmp_path / "map.html")
    red = page.locator("#by-batch canvas").evaluate("""(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((x, i) => i % 4 === 0 && x > 150 && data[i + 2] < 60).length;
    }""")
    assert 5 < red < 100


def test_search(show: Any, trace: Trace, tmp_path: Path) -> None:
    """By module, operation, source and label, all words; and by what a frame is."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    frames = trace.batches[0].frames
    for text, wanted in (
        ("second", [f for f in frames if "second" in f"{f.name} {f.source}"]),
        ("HIDDEN exp", [f for f in frames if "exp" in str(f.source)]),
        ("weight first", [f for f in frames if f.name == "first"]),
        ("nothing like this", []),
        ("", list(frames)),
    ):
        page.fill("#search", text)
        assert rows_shown(page) == numbers(wanted)
    page.select_option("#kind", "op")
    assert rows_shown(page) == numbers(f for f in frames if f.is_op)
    page.select_option("#kind", "module")
    assert rows_shown(page) == numbers(f for f in frames if not f.is_op)
    page.select_option("#kind", "bad")
    assert page.inner_text("#page-name") == "no frame"


def test_zoom(show: Any, trace: Trace, tmp_path: Path) -> None:
    """By dragging, buttons and keys; everything is shown again by a double click."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    frames = trace.batches[0].frames

    def view() -> list[str]:
        """What the mouse finds at the left and the right end."""
        found = []
        for index in (0, len(frames) - 1):
            put_mouse(page, index, len(frames))
            page.wait_for_selector("#tip:visible")
            found.append(page.inner_text("#tip strong"))
        return found

    ends = [frames[0].title, frames[-1].title]
    assert view() == ends
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 50, steps=5)
    page.mouse.up()
    assert view()[0] != ends[0]
    assert not page.is_visible("#selected")  # dragging selects nothing
    page.mouse.dblclick(box["x"] + 100, box["y"] + 50)
    assert view() == ends
    page.click("#zoom-in")
    assert view() != ends
    page.click("#zoom-all")
    assert view() == ends
    page.locator("#chart").press("+")
    assert view() != ends
    page.locator("#chart").press("Escape")
    assert view() == ends


def test_keyboard(show: Any, trace: Trace, tmp_path: Path) -> None:
    """Arrow keys say where one is, Enter selects; everything can be reached with Tab."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    frames = trace.batches[0].frames
    chart = page.locator("#chart")
    chart.press("Home")
    chart.press("ArrowRight")
    said = chart.get_attribute("aria-label")
    assert f"Now at frame 1, {frames[1].title}, made {frames[1].rows[-1].abs_min:.2e} to" in said
    chart.press("Enter")
    assert page.inner_text("#selected strong") == frames[1].title
    page.click("#zoom-in")
    chart.press("End")  # out of what is shown now
    assert page.inner_text("#tip strong") == frames[-1].title
    chart.press("Enter")
    assert page.inner_text("#selected strong") == frames[-1].title
    page.click("summary:has-text('Lines')")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"search", "kind", "batch", "chart", "SUMMARY", "smallest", "zoom-in"} <= reached


def test_the_tree(show: Any, trace: Trace, tmp_path: Path) -> None:
    """Opens, shows the least headroom in bits, and leads to the frames of a module."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    [mul] = [frame for frame in trace.batches[0].frames if frame.kind == "mul"]
    largest = mul.rows[-1].abs_max
    assert largest is not None
    limit = torch.finfo(torch.float32).max
    bits = torch.log2(torch.tensor(limit / largest, dtype=torch.float64)).item()
    assert f"{bits:.1f} bits" in page.inner_text("#tree .leaf:has-text('mul')")
    page.click("#tree .leaf:has-text('mul')")
    assert page.inner_text("#selected strong") == "mul"
    page.click("#tree summary:has-text('second')")
    page.click("#tree details:has(> summary:has-text('second')) > div > .leaf:has-text('show')")
    assert page.input_value("#search") == "second"


def test_an_underflow(show: Any, tmp_path: Path) -> None:
    """Its frame is the one that is selected, though nothing in it is bad."""
    found: list[Report] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(-1e-9, 1e-9), nn.Linear(8, 2)).half()
    fxguard.instrument(model, underflow=0.5, on_detect=found.append)(X.half())
    [report] = found
    report.to_html(tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    assert page.inner_text("h1") == "Detected underflow in batch 0"
    assert page.inner_text("header .verdict p") == report.verdict[0]
    assert page.inner_text("#selected strong") == report.frames[-1].title == "1 Hardtanh"
    page.select_option("#kind", "marked")
    assert page.inner_text("#count").startswith("1 of ")


def test_lines_and_themes(show: Any, trace: Trace, tmp_path: Path) -> None:
    """Limits can be switched on; light and dark follow the system and the button."""
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html", color_scheme="dark")
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(20, 23, 27)"
    page.click("#theme")
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    page.click("summary:has-text('Lines')")
    everything = drawn(page)
    page.uncheck("#limit-float8_e4m3fn")
    without_limit = drawn(page)
    assert without_limit < everything
    page.uncheck("#smallest")
    assert drawn(page) < without_limit
    page.check("#limit-float8_e4m3fn")
    page.check("#smallest")
    assert drawn(page) == everything


def test_a_diff(show: Any, tmp_path: Path) -> None:
    """Both numbers next to each other, what differs, what is in one only."""

    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).exp() + 1
            return self.second(hidden * hidden)

    found = fxguard.compare(Net(), Other(), X).ranges
    found.to_html(tmp_path / "diff.html")
    page = show(tmp_path / "diff.html")
    assert page.inner_text("h1") == "Where two traces part"
    assert page.inner_text("header .verdict p") == found.verdict[0]
    assert found.first is not None
    assert found.first.frame.kind == "mul"
    assert page.inner_text("#selected strong") == "mul"
    page.select_option("#kind", "marked")
    assert page.inner_text("#count").startswith(f"{len(found.batches[0].differing)} of ")
    shown = rows_shown(page)
    [pair] = found.first.of(RowRole.OUTPUT)
    a, b = pair.a, pair.b
    wanted = [f"{x:.2e}" for x in (a.abs_min, a.abs_max, b.abs_min, b.abs_max)]  # type: ignore[str-format]
    assert ["output", *wanted, f"{pair.distance:.1e}", "float32"] in shown
    page.select_option("#kind", "all")
    page.fill("#search", "add")
    assert "only in B" in page.inner_text("#table")
    assert drawn(page) > 5000


F16, F32 = 65504.0, 3.4028234663852886e38


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Row("output", 0.0, F32, dtype="float32"), Row("output", 0.0, F16, dtype="float16")),
        (Row("output", 0.0, F16, dtype="float32"), Row("output", 0.0, F16 / 2, dtype="float16")),
        (Row("output", 1.0, 2.0, dtype="float32"), Row("output", 1.5, 2.5, dtype="float32")),
        (Row("output", 0.0, 0.0), Row("output", 0.0, 0.0)),
        (Row("output", NAN, NAN), Row("output", NAN, NAN)),
        (Row("output", 0.0, INF), Row("output", 1.0, INF)),
        (Row("output", 0.0, 1.0), Row("output", 0.0, INF)),
        (Row("output", 0.0, INF), Row("output", NAN, NAN)),
        (Row("output", note="None"), Row("output", 0.0, 1.0)),
    ],
)
def test_a_page_and_its_verdict_agree(show: Any, tmp_path: Path, a: Row, b: Row) -> None:
    """The differences of a page are those of `diff`, by the same rules: masks differ by nothing."""
    frames = [(Frame("a", "where", True, (row,)),) for row in (a, b)]
    found = diff(*(TracedBatch(0, each) for each in frames))
    found.to_html(tmp_path / "diff.html")
    page = show(tmp_path / "diff.html")
    page.fill("#search", "where")
    [pair] = found.batches[0].aligned[0].rows
    far = "-" if pair.distance is None else f"{pair.distance:.1e}" if pair.distance else "0"
    cells = next(cells for cells in rows_shown(page) if cells[0] == "output")
    assert cells[-2] == far
    assert found.differs == bool(pair.distance)


def test_rows_that_are_equal_stand_in_the_file_once(show: Any, tmp_path: Path) -> None:
    """What reads what another has made, and what stays from batch to batch, has its numbers."""

    def batch(number: int, *made: float) -> TracedBatch:
        read = (1.0, *made)
        frames = [
            Frame(
                f"layer{i}",
                "mul",
                True,
                (
                    Row("weight", 0.5, 0.75),
                    Row("input[0]", 0.25, read[i]),
                    Row("output", 0.25, x) if x else Row("output", note="None"),
                ),
            )
            for i, x in enumerate(made)
        ]
        return TracedBatch(number, tuple(frames))

    batches = (batch(0, 2.0, 4.0), batch(1, 2.0, 8.0), batch(2, INF, NAN), batch(3, 0.0, 3.0, 2.0))
    trace = Trace("Net", None, "2.13.0", batches)
    trace.to_html(tmp_path / "trace.html")
    text = (tmp_path / "trace.html").read_text()
    assert text.count('["5.00e-01","7.50e-01"]') == 1
    page = show(tmp_path / "trace.html")
    for number, each in enumerate(batches):
        page.evaluate(
            "n => { const it = document.getElementById('batch');"
            "it.value = n; it.dispatchEvent(new Event('input')); }",
            number,
        )
        wanted = [
            [row.label, row.note]
            if row.note
            else [row.label, f"{row.abs_min:.2e}", f"{row.abs_max:.2e}"]
            for frame in each.frames
            for row in frame.rows
        ]
        shown = [cells[: len(want)] for cells, want in zip(rows_shown(page), wanted, strict=True)]
        assert shown == wanted


def test_numbers_are_those_of_the_report(show: Any, tmp_path: Path) -> None:
    """To the last digit, where two are as near too: Python and JavaScript round those otherwise."""
    ties = [(100 + i + 0.5) * 10.0**e for i in range(60) for e in (0, 3)]
    powers = [x * 2.0**e for x in (1, 1.125, 1.375, 9.995) for e in range(-140, 120, 7)]
    nearly = [1.234_999_9, 9.994_999_99, 1.797_693e308]  # rounded twice they would be others
    rows = tuple(Row(f"output[{i}]", 0.0, x) for i, x in enumerate([*ties, *powers, *nearly]))
    Trace("Net", None, "2.13.0", (TracedBatch(0, (Frame("", "Net", False, rows),)),)).to_html(
        tmp_path / "numbers.html"
    )
    page = show(tmp_path / "numbers.html")
    assert [row[2] for row in rows_shown(page)] == [f"{row.abs_max:.2e}" for row in rows]
    assert drawn(page) > 5000  # 1.80e+308 is not infinite


def test_parameters_and_masks_are_not_what_a_frame_made(show: Any, tmp_path: Path) -> None:
    """What is called like an output, and what is masked on purpose, says nothing of headroom."""
    scale = Row("output_scale", 0.0, 30000.0, dtype="float16")
    masked = Row("output[0]", 0.0, F16, dtype="float16")
    indices = Row("output[1]", 0.0, 7.0, dtype="int64")
    made = Row("output[2]", 0.5, 8188.0, dtype="float16")
    frame = Frame("head", "Scale", False, (scale, masked, indices, made))
    Trace("Net", None, "2.13.0", (TracedBatch(0, (frame,)),)).to_html(tmp_path / "roles.html")
    page = show(tmp_path / "roles.html")
    assert "3.0 bits" in page.inner_text("#tree summary:has-text('head')")
    page.locator("#chart").press("Home")
    said = page.locator("#chart").get_attribute("aria-label")
    assert "Now at frame 0, head Scale, made 0.00e+00 to 6.55e+04." in said


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "--><svg onload=alert(1)>",
    "&lt;b&gt; \" ' ` ${alert(1)} \u2028 \x00 \x1b[31m <!--DATA-->",
    "javascript:alert(1)//https://example.com",
    "\ud800 half a pair",
)


@pytest.mark.parametrize(
    "ranges",
    [
        (),
        ((None, None),),
        ((0.0, 0.0),),
        ((0.0, INF), (NAN, NAN)),
        ((5e-324, 1e-310), (1e300, 1.7e308)),
        ((-3.0, -1.0), (2.0, 1.0)),  # no such thing; a report in JSON may say so
    ],
)
def test_odd_numbers(show: Any, tmp_path: Path, ranges: tuple[Any, ...]) -> None:
    """No frame at all, none with numbers, zeros, the ends of float64: the page works."""
    frames = tuple(
        Frame("", "mul", True, (Row("output", low, high, dtype="float64"),)) for low, high in ranges
    )
    batch = TracedBatch(0, frames)
    Trace("Net", None, "2.13.0", (batch, batch)).to_html(tmp_path / "odd.html")
    page = show(tmp_path / "odd.html", wait_for="#count")
    put_mouse(page, 0, 1)
    for key in ("Home", "ArrowRight", "Enter", "+", "-", "Escape", "End", "Enter"):
        page.locator("#chart").press(key)
    page.fill("#batch", "1")
    assert len(rows_shown(page)) == len(ranges)
    assert page.is_visible("#selected") is bool(ranges)


def hostile(text: str) -> tuple[Trace, Report, Diff]:
    """A trace, a report and a comparison in which every string is the same."""
    source = Source(f"/{text}", 3, text)
    rows = (Row(text, 0.0, 1.0, dtype=text), Row("output", note=text), Row("output", 0.0, 1.0))
    frame = Frame(text, text, True, rows, source)
    other = Frame(f"{text}.other", text, False, rows, source)
    batch = TracedBatch(0, (frame, other), 3, (text, text), (0,))
    worse = replace(frame, rows=(*rows[:2], Row("output", 0.0, 2.0)))
    return (
        Trace(text, None, text, (batch, batch)),
        Report(0, (frame,), (Origin(frame, "inf", text, text),), error=text),
        diff(batch, TracedBatch(1, (worse,), None, (text,))),
    )


TAGS_OF_TEXT = ("div", "p", "strong", "pre", "details", "summary")
TAGS_OF_TABLES = ("table", "thead", "tbody", "tr", "th", "td")


class InNotebook(HTMLParser):
    """What Jupyter puts into its page: text, tables, and one frame that may only run scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.frames: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs)
        if tag == "iframe":
            self.frames.append(given.pop("srcdoc"))
            assert given.pop("sandbox") == "allow-scripts"
            assert given.pop("width") == "100%"
            assert given.keys() == {"height", "style", "title"}
        else:
            assert tag in TAGS_OF_TEXT + TAGS_OF_TABLES
            assert given.keys() <= {"style"}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_notebooks_only_show_strings(text: str, tmp_path: Path) -> None:
    """What Jupyter gets has tags of text and tables, and a frame that holds the page as it is."""
    for shown in hostile(text):
        found = InNotebook(shown._repr_html_())
        assert text.replace("\ud800", "&#55296;") in found.text.replace("\ufffd", "&#55296;")
        shown.to_html(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert found.frames == [page.replace("<body>", '<body class="framed">')]


def in_notebook(path: Path, *results: Any) -> None:
    """A page with what a notebook shows of results, as Jupyter puts it there."""
    shown = "<hr>".join(result._repr_html_() for result in results)
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{shown}", encoding="utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_frames_of_notebooks_only_show_strings(show: Any, tmp_path: Path, text: str) -> None:
    """In a browser too: no string runs, and no script of the page reaches the notebook."""
    path = tmp_path / "notebook.html"
    in_notebook(path, *hostile(text))
    page = show(path, wait_for="iframe")
    assert page.locator("iframe").count() == 3
    assert not page.locator("script, img, svg").count()
    for frame in page.frames[1:]:
        frame.wait_for_selector("#table tbody")
        frame.fill("#search", "output")
        frame.locator("#chart").press("Home")
        frame.locator("#chart").press("Enter")
        assert not frame.locator("script:not([type])").count() > 2
        assert not frame.locator("img, svg").count()
        assert re.split(r"\s", text)[0] in frame.inner_text("#selected")
        with pytest.raises(needs("playwright.sync_api").Error, match="SecurityError"):
            frame.evaluate("parent.document.title")


def test_a_notebook(show: Any, report: Report, trace: Trace, tmp_path: Path) -> None:
    """The verdict stands there once, with its fix; below it the page works as in a file."""
    path = tmp_path / "notebook.html"
    in_notebook(path, report, trace)
    page = show(path, wait_for="iframe")
    assert page.inner_text("p >> nth=0") == report.verdict[0]
    assert page.locator("strong").all_inner_texts() == [
        line for line in report.verdict if line.startswith(("  fix: ", "  or: "))
    ]
    first, second = page.frames[1:]
    for frame in (first, second):
        frame.wait_for_selector("#table tbody")
        assert drawn(frame) > 5000
        assert not frame.is_visible("header .verdict")
        assert not frame.is_visible("h1")
    assert rows_shown(first) == numbers(report.frames)
    assert first.inner_text("#selected strong") == report.origins[0].frame.title
    second.fill("#batch", "1")
    assert rows_shown(second) == numbers(trace.batches[1].frames)
    assert not page.is_visible("table")
    page.click("summary:has-text('frames as a table')")
    assert "exp" in page.inner_text("table")


@pytest.mark.parametrize("text", HOSTILE)
def test_strings_are_only_shown(show: Any, tmp_path: Path, text: str) -> None:
    """Whatever stands in names, source, labels, notes, dtypes and verdicts runs nothing."""
    paths = [tmp_path / name for name in ("trace.html", "report.html", "diff.html")]
    for made, path in zip(hostile(text), paths, strict=True):
        made.to_html(path)
    for path in paths:
        page = show(path)
        page.fill("#search", "output")
        put_mouse(page, 0, 2)
        page.locator("#chart").press("Home")
        page.locator("#chart").press("Enter")
        page.click("#tree summary >> nth=-1")
        if path is not paths[1]:
            page.select_option("#kind", "bad")
        assert not page.locator("script:not([type])").count() > 2
        assert not page.locator("img, svg").count()
        assert re.split(r"\s", text)[0] in page.inner_text("#selected")


def test_the_policy_forbids_other_scripts(browser: Any, report: Report, tmp_path: Path) -> None:
    """A script that somebody puts into the file does not run."""
    report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for added in ("<script>window.ran = 1</script>", "<img src=x onerror='window.ran = 1'>"):
        (tmp_path / "changed.html").write_text(text.replace("</body>", f"{added}</body>"))
        page = browser.new_page()
        page.goto((tmp_path / "changed.html").as_uri())
        page.wait_for_selector("#table tbody")
        assert page.evaluate("window.ran") is None
        page.close()


def test_twenty_thousand_operations(show: Any, tmp_path: Path) -> None:
    """A page at a time; the search finds the last one."""
    row = Row("output", 1e-3, 2.0, dtype="bfloat16")
    frames = tuple(Frame(f"layers.{i // 100}", "mul", True, (row,)) for i in range(20_000))
    trace = Trace("Deep", None, "2.13.0", (TracedBatch(0, frames), TracedBatch(1, frames)))
    trace.to_html(tmp_path / "deep.html")
    assert (tmp_path / "deep.html").stat().st_size < 4_000_000
    page = show(tmp_path / "deep.html")
    assert page.inner_text("#count") == "20000 frames"
    assert len(rows_shown(page)) == 100
    page.click("#next")
    assert page.inner_text("#page-name") == "101 to 200 of 20000"
    page.fill("#search", "layers.199")
    assert page.inner_text("#count") == "100 of 20000 frames"
    chart = page.locator("#chart")
    chart.press("End")
    chart.press("Enter")
    assert page.get_attribute("#table tbody.chosen", "data-index") == "19999"
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        chart.press(key)  # several frames share a pixel, and the keyboard misses none
    assert page.get_attribute("#table tbody.chosen", "data-index") == "3"
    page.fill("#batch", "1")
    assert drawn(page) > 5000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(
    show: Any, trace: Trace, report: Report, tmp_path: Path, scheme: str
) -> None:
    """axe, which knows the rules of WCAG, finds nothing."""
    axe = needs("axe_playwright_python.sync_playwright").Axe()
    report.to_html(tmp_path / "report.html")
    trace.to_html(tmp_path / "trace.html")
    diff(trace.batches[0], trace.batches[1]).to_html(tmp_path / "diff.html")
    for name in ("report", "trace", "diff"):
        page = show(tmp_path / f"{name}.html", color_scheme=scheme)
        results = axe.run(page)
        assert results.violations_count == 0, results.generate_report()


def test_without_javascript(browser: Any, report: Report, tmp_path: Path) -> None:
    """The verdict is there, and what is missing is said."""
    report.to_html(tmp_path / "report.html")
    page = browser.new_page(java_script_enabled=False)
    page.goto((tmp_path / "report.html").as_uri())
    assert report.verdict[0] in page.inner_text("header")
    assert "need JavaScript" in page.inner_text(".notice")
    page.close()


def test_a_trace_without_a_batch(tmp_path: Path) -> None:
    with pytest.raises(fxguard.FxguardError, match="has nothing to show"):
        Trace("Net", None, "2.13.0", ()).to_html(tmp_path / "x.html")
