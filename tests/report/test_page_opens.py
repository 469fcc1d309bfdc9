"""What an HTML page shows first, in a real browser: the cause, on a desk and on a telephone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fxguard import diff
from fxguard.types import Frame, Row, Trace, TracedBatch
from support.needs import needs
from support.pages import CAUSE, PHONE, SCENES, scene
from support.t5_overflow import REPORT

pytestmark = pytest.mark.slow

INF = math.inf
KEPT = Path(__file__).with_name("screenshots")


def title_at(page: Any, share: float) -> str:
    """What the mouse finds in the chart, so far from its left end."""
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip:visible")
    return str(page.inner_text("#tip strong"))


def first_in_table(page: Any) -> str:
    """Index of the frame at the upper edge of what the table shows."""
    return str(
        page.evaluate("""() => {
            const head = document.querySelector("#table thead th").getBoundingClientRect().bottom;
            const all = [...document.querySelectorAll("#table tbody")];
            return all.find((it) => it.getBoundingClientRect().bottom > head + 2).dataset.index;
        }""")
    )


def test_the_chart_opens_on_the_way_to_the_cause(show: Any, tmp_path: Path) -> None:
    """The whole range is one click away, and so is the way back."""
    scene("cause").to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    frames = scene("cause").batches[0].frames
    left, right = frames[CAUSE - 36].title, frames[CAUSE + 10].title
    assert (title_at(page, 0.001), title_at(page, 0.999)) == (left, right)
    page.click("#zoom-all")
    assert (title_at(page, 0.001), title_at(page, 0.999)) == (frames[0].title, frames[-1].title)
    page.click("#zoom-cause")
    assert (title_at(page, 0.001), title_at(page, 0.999)) == (left, right)
    page.locator("#chart").press("Escape")
    page.locator("#chart").press("c")
    assert title_at(page, 0.001) == left
    said = page.get_attribute("#chart", "aria-label")
    assert f"The chart opens on {frames[CAUSE].kind}, frame {CAUSE}." in said


def test_the_table_starts_at_the_cause(show: Any, tmp_path: Path) -> None:
    """What led there is above it."""
    scene("cause").to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    assert first_in_table(page) == str(CAUSE)
    above = page.evaluate("document.querySelector('.scroll').scrollTop")
    assert above > 0
    REPORT.to_html(tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    [row] = page.query_selector_all("#table tbody.chosen")
    assert row.get_attribute("data-index") == str(len(REPORT.frames) - 1)
    assert row.is_visible()


def test_what_comes_after_the_cause_is_pale(show: Any, tmp_path: Path) -> None:
    """The same colours, and nearly those of the page."""
    scene("cause").to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    strong = """(ranges) => {
        const canvas = document.querySelector("#chart canvas");
        const box = canvas.getBoundingClientRect();
        const over = document.querySelector("#chart .u-over").getBoundingClientRect();
        const scale = canvas.width / box.width;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const dark = (x, y) => {
          const at = 4 * (y * canvas.width + x);
          return data[at + 3] > 128 && Math.min(data[at], data[at + 1], data[at + 2]) < 120;
        };
        const place = (share) => Math.round((over.left - box.left + over.width * share) * scale);
        return ranges.map(([from, to]) => {
          const end = Math.round((over.bottom - box.top) * scale);
          let count = 0;
          for (let x = place(from); x < place(to); x++)
            for (let y = 0; y < end; y++) count += dark(x, y);
          return count;
        });
    }"""
    at = 37 / 47  # the cause is the 37th of 47 frames
    before, after = page.evaluate(strong, [[0.02, at - 0.03], [at + 0.05, 1]])
    assert before > 500
    assert after == 0


def test_the_first_lines_say_what_to_do(show: Any, tmp_path: Path) -> None:
    """The headline, the fix and the reasons are seen; all else is a click away."""
    scene("cause").to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    verdict = scene("cause").verdict
    shown = page.inner_text("header .verdict")
    for line in verdict:
        is_first = line.startswith(("batch 0: ", "  model.py", "  at ", "  fix: ", "  why: "))
        assert (line.strip() in shown) == is_first, line
    page.click("header .verdict summary")
    shown = page.inner_text("header .verdict")
    assert all(line.strip() in shown for line in verdict)


def test_no_row_repeats_the_verdict(show: Any, tmp_path: Path) -> None:
    """The note of the cause stands with the frame that is selected, and not in the table again."""
    REPORT.to_html(tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    fix = str(REPORT.origins[0].fixes[0])
    assert fix in page.inner_text("#selected")
    assert fix not in page.inner_text("#table")


def batch(number: int, *largest: float, verdict: tuple[str, ...] = ()) -> TracedBatch:
    """A batch of a model that multiplies, and returns its last product."""
    rows = [(Row("output", 1.0, x, dtype="float16"),) for x in largest]
    frames = [Frame(f"layers.{i}", "mul", True, row) for i, row in enumerate(rows)]
    blamed = (len(largest) - 1,) if verdict else ()
    return TracedBatch(number, (*frames, Frame("", "Net", False, rows[-1])), None, verdict, blamed)


@pytest.mark.parametrize(
    ("batches", "opens", "cause"),
    [
        ((batch(7, 2.0, 3.0), batch(8, 2.0, INF, verdict=("mul made inf",))), "8", "layers.1 mul"),
        ((batch(7, 2.0, 3.0), batch(8, 2.0, INF), batch(9, INF, INF)), "8", "layers.1 mul"),
        ((batch(7, 2.0, 3.0), batch(8, 2.0, 4.0)), "7", None),
    ],
)
def test_a_page_opens_on_the_batch_of_its_headline(
    show: Any, tmp_path: Path, batches: Any, opens: str, cause: str | None
) -> None:
    """That of the verdict, or the first that returned an inf; and says how it differs."""
    trace = Trace("Net", None, "2.13.0", batches)
    trace.to_html(tmp_path / "trace.html")
    page = show(tmp_path / "trace.html")
    assert page.inner_text("#batch-name") == opens
    assert page.is_visible("#selected") is (cause is not None)
    if cause is not None:
        assert f"batch {opens}: " in page.inner_text("header .verdict p")
        assert page.inner_text("#selected strong") == cause
    states = []
    for number in range(len(batches)):
        page.fill("#batch", str(number))
        states.append(page.inner_text("#batch-state"))
    wanted = {
        (): "all numbers are finite",
        (1, 2): "2 frames hold inf or NaN",
        (0, 1, 2): "3 frames hold inf or NaN",
    }
    for number, (state, each) in enumerate(zip(states, batches, strict=True)):
        bad = tuple(i for i, frame in enumerate(each.frames) if frame.made_bad)
        said = "mul made inf" if each.verdict else wanted[bad]
        assert state == f"{number + 1} of {len(batches)}: {said}"


def test_a_comparison_opens_where_they_part(show: Any, tmp_path: Path) -> None:
    """On the first batch that differs, at the first operation that does."""
    a = Trace("Net", None, "2.13.0", (batch(0, 2.0, 3.0), batch(1, 2.0, 3.0)))
    b = Trace("Net", None, "2.13.0", (batch(0, 2.0, 3.0), batch(1, 2.0, 64.0)))
    diff(a, b).to_html(tmp_path / "diff.html")
    page = show(tmp_path / "diff.html")
    assert page.inner_text("#batch-name") == "1"
    assert page.inner_text("#selected strong") == "layers.1 mul"


@pytest.mark.parametrize("name", SCENES)
def test_a_telephone_scrolls_in_one_direction(show: Any, tmp_path: Path, name: str) -> None:
    """The verdict, then the chart, on the first two screens; nothing is wider than the screen."""
    scene(name).to_html(tmp_path / "page.html")
    page = show(tmp_path / "page.html", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    verdict, chart = (page.locator(it).bounding_box() for it in ("header .verdict", "#chart"))
    assert verdict["y"] < 120
    assert verdict["y"] + verdict["height"] < chart["y"] < PHONE["height"]
    assert chart["width"] <= PHONE["width"]


def test_axes_and_the_map_have_titles(show: Any, tmp_path: Path) -> None:
    """What is drawn says what it is."""
    scene("batches").to_html(tmp_path / "page.html")
    page = show(tmp_path / "page.html")
    assert page.inner_text("#by-batch h3") == "What changed from batch to batch"
    axes = page.evaluate("""async () => {
        const drawn = [];
        const fill = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
            drawn.push(text);
            return fill.call(this, text, ...where);
        };
        document.getElementById("zoom-in").click();
        await new Promise((resolve) => setTimeout(resolve, 200));
        return drawn;
    }""")
    assert {"operation, in order of execution", "magnitude"} <= set(axes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", SCENES)
def test_pages_look_as_they_did_when_somebody_looked(
    show: Any, tmp_path: Path, name: str, scheme: str
) -> None:
    """At both widths, but for fonts: small pictures of both differ by little.

    ``python tests/support/pages.py`` takes the pictures again; look at them before you keep them.
    """
    image = needs("PIL.Image")
    chops = needs("PIL.ImageChops")
    scene(name).to_html(tmp_path / "page.html")
    for device, viewport in SCENES[name].items():
        page = show(tmp_path / "page.html", viewport=viewport, color_scheme=scheme)
        page.wait_for_timeout(200)
        page.screenshot(path=tmp_path / "now.png")
        small = [
            image.open(path).convert("RGB").resize((viewport["width"] // 16, 50), image.BOX)
            for path in (tmp_path / "now.png", KEPT / f"{name}-{device}-{scheme}.png")
        ]
        data = chops.difference(*small).convert("L").tobytes()
        assert sum(data) / len(data) < 4, f"{name}-{device}-{scheme}"  # of 255
