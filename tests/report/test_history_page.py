"""The page of a training run, in a real browser: the map of its series, the loss, a series."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxguard
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.report.event import Event
from support.histories import CAUSE, LOSS, series_of, write_history
from support.needs import needs

needs("pyarrow")

pytestmark = pytest.mark.slow

JUMP = 200
STEPS = 300
READY = "#map[data-ready]"
PHONES = [{"width": 360, "height": 800}, {"width": 390, "height": 844}]

Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with a jump."""
    return page_of(write_history(tmp_path_factory.mktemp("jump"), STEPS, jump=JUMP))


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(write_history(tmp_path_factory.mktemp("well"), STEPS))


def page_of(folder: Path) -> Path:
    path = folder / "page.html"
    fxguard.load_history(folder).to_html(path)
    return path


# The colours of the map, as counts of strong pixels: above the band, below it.
COUNTS = """() => {
    const canvas = document.getElementById("map"), ratio = canvas.width / canvas.clientWidth;
    const left = Math.round(130 * ratio);
    const { data } = canvas.getContext("2d")
        .getImageData(left, 0, canvas.width - left - 14, canvas.height - 24 * ratio);
    let above = 0, below = 0;
    for (let i = 0; i < data.length; i += 4) {
        if (data[i] - data[i + 2] > 110) above++;
        if (data[i + 2] - data[i] > 110) below++;
    }
    return [above, below];
}"""


def at(page: Any, step: float, row: float, steps: tuple[int, int] = (0, STEPS)) -> tuple[Any, Any]:
    """Where the map shows a step and a series."""
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map").bounding_box()
    left = 128 if page.viewport_size["width"] >= 600 else 74
    share = (step + 0.5 - steps[0]) / (steps[1] - steps[0])
    x = box["x"] + left + (box["width"] - left - 10) * share
    return x, box["y"] + (box["height"] - 20) * (row + 0.5) / len(series_of())


def row_of(name: str) -> int:
    names = [
        one.name for one in sorted(series_of(), key=lambda one: (one.kind == "time", one.order))
    ]
    return names.index(name)


def test_a_run_with_a_jump(show: Opened, jump: Path) -> None:
    """It opens on the event, with the series that changed first, and says what Python says."""
    page = show(jump, READY)
    history = fxguard.load_history(jump.parent)
    shown = page.inner_text("header .verdict")
    assert all(line.strip() in shown for line in history.verdict)
    assert page.inner_text(".meta") == f"steps 0 to 299, {len(history.series)} series"
    assert page.inner_text("#series-name") == f"drift {CAUSE}"
    assert (
        page.inner_text("#series-place")
        == "first 0, median 0, last 0; 216 deviations above at step 200"
    )
    above, _ = page.evaluate(COUNTS)
    assert above > 5_000
    told = re.search(r"; (\d+) of them left their band", page.get_attribute("#map", "aria-label"))
    assert 15 < int(told[1]) < len(history.series)


def test_a_healthy_run_is_pale(show: Opened, well: Path) -> None:
    """No event, no button for one, nothing selected, and no strong colour."""
    page = show(well, READY)
    assert page.inner_text("header .verdict").startswith("no event in 300 steps")
    assert not page.is_visible("#zoom-event")
    assert not page.is_visible("#selected")
    assert page.evaluate(COUNTS)[0] < 200


def test_hover_and_click(show: Opened, jump: Path) -> None:
    """Hover shows step, number and distance; a click shows the series as a line with its band."""
    page = show(jump, READY)
    page.click("#zoom-all")
    name = "operation blocks.1 softmax model.py:22"
    track = fxguard.load_history(jump.parent).get(name)
    page.mouse.move(*at(page, 201, row_of(name)))
    page.wait_for_selector("#tip:visible")
    assert page.inner_text("#tip strong") == name
    page.locator("#tip div").nth(1).wait_for()
    place, numbers = page.locator("#tip div").all_inner_texts()
    step = int(re.fullmatch(r"step (\d+): .*deviations above its band's middle", place)[1])
    assert abs(step - 201) <= 1
    largest = float(re.fullmatch(r"largest (\S+), smallest (\S+)", numbers)[1])
    assert largest == pytest.approx(track.high[step], rel=0.006)
    page.mouse.down()
    page.mouse.up()
    assert page.inner_text("#series-name") == name
    assert page.inner_text("#series-place").startswith("model.py:22: first ")
    assert page.get_attribute("#table tr.chosen", "data-index") == str(row_of(name))
    drawn = """(canvas) => {
        const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return all.filter((x, i) => i % 4 === 3 && x > 0).length;
    }"""
    page.wait_for_timeout(100)
    assert page.locator("#series").evaluate(drawn) > 3_000


def test_numbers_are_unpacked_as_they_were(show: Opened, jump: Path) -> None:
    """Of each kind of series, at the first, the last and the jump: what the mouse shows."""
    page = show(jump, READY)
    page.click("#zoom-all")
    history = fxguard.load_history(jump.parent)
    names = (LOSS, f"weight {CAUSE}", f"drift {CAUSE}", "input input x mean", "time seconds")
    for name in names:
        track = history.get(name)
        page.locator("#map").press("Escape")
        for step in (0, JUMP, STEPS - 1):
            page.mouse.move(*at(page, step, row_of(name)))
            page.locator("#tip strong", has_text=name).wait_for()
            page.locator("#tip div").nth(1).wait_for()
            place, number = page.locator("#tip div").all_inner_texts()
            found = int(re.match(r"step (\d+)", place)[1])
            expected = track.high[found]
            assert float(number) == pytest.approx(expected, rel=0.006, abs=2e-5)


def test_nothing_is_lost_between_pixels(show: Opened, tmp_path: Path) -> None:
    """One step of ten thousand, in one series of two hundred: the map of the whole run shows it."""
    writer = Writer(tmp_path, about={})
    for i in range(200):
        name = f"operation blocks.{i} mul"
        writer.register(Series(name, "operation", f"blocks.{i} mul", "", i))
    for step in range(4_000):
        numbers = [64.0 if (i, step) == (77, 3_003) else 1.0 for i in range(200)]
        writer.add(Row(step, numbers, numbers))
    writer.close()
    page = show(page_of(tmp_path), READY)
    above, below = page.evaluate(COUNTS)
    assert 2 <= above <= 20
    assert below == 0
    far = page.inner_text("#table tr.left td:last-child")
    assert far == "60 deviations above at step 3003"


def test_zoom(show: Opened, jump: Path) -> None:
    """By buttons, by dragging and by keys; a double click shows everything again."""
    page = show(jump, READY)
    canvas = page.locator("#map")

    def ends() -> list[int]:
        """The steps that the mouse finds at both ends."""
        box = canvas.bounding_box()
        found = []
        for x in (box["x"] + 129, box["x"] + box["width"] - 12):
            page.mouse.move(x, box["y"] + 40)
            page.wait_for_selector("#tip:visible")
            found.append(
                int(re.match(r"step (\d+)", page.inner_text("#tip div:nth-of-type(1)"))[1])
            )
        return found

    assert ends() == [40, 295]
    page.click("#zoom-all")
    page.wait_for_timeout(50)
    assert ends() == [0, STEPS - 1]
    page.mouse.move(*at(page, 100, 10))
    page.mouse.down()
    page.mouse.move(*at(page, 199, 10), steps=4)
    page.mouse.up()
    page.wait_for_timeout(50)
    assert ends() == pytest.approx([100, 199], abs=2)
    page.mouse.dblclick(*at(page, 150, 10))
    page.wait_for_timeout(50)
    assert ends() == [0, STEPS - 1]
    canvas.press("+")
    page.wait_for_timeout(50)
    assert ends() != [0, STEPS - 1]
    canvas.press("Escape")
    page.wait_for_timeout(50)
    assert ends() == [0, STEPS - 1]
    canvas.press("n")
    page.wait_for_timeout(50)
    assert ends() == [40, 295]


def test_keyboard(show: Opened, jump: Path) -> None:
    """Arrow keys say where one is, Enter selects, and all that can be done can be reached."""
    page = show(jump, READY)
    canvas = page.locator("#map")
    row = row_of(f"drift {CAUSE}")
    canvas.press("ArrowDown")
    said = canvas.get_attribute("aria-label")
    assert f"Now at weight {CAUSE}, step 200: more than 32 deviations above" in said
    canvas.press("Enter")
    assert page.inner_text("#series-name") == f"weight {CAUSE}"
    canvas.press("ArrowLeft")
    assert "step 199: in its band." in canvas.get_attribute("aria-label")
    canvas.press("End")
    assert "step 299: " in canvas.get_attribute("aria-label")
    canvas.press("Home")
    assert "step 0: too little was measured before." in canvas.get_attribute("aria-label")
    canvas.press("PageUp")
    assert f"Now at {series_of()[0].name}, " in canvas.get_attribute("aria-label")
    assert row < 10
    reached = set()
    page.keyboard.press("Tab")
    for _ in range(40):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert reached >= {"search", "kind", "order", "SUMMARY", "BUTTON"}


def test_the_table(show: Opened, jump: Path) -> None:
    """By words, by what it is, by what left its band; a click shows the series."""
    page = show(jump, READY)
    names = lambda: page.locator("#table tbody button").all_inner_texts()  # noqa: E731
    assert len(names()) == len(series_of())
    page.fill("#search", "blocks.1 SOFTMAX")
    assert names() == ["operation blocks.1 softmax model.py:22"]
    page.fill("#search", "nothing like this")
    assert page.inner_text("#page-name") == "no series"
    page.fill("#search", "")
    page.select_option("#kind", "loss")
    assert names() == [LOSS]
    page.select_option("#kind", "left")
    left = names()
    assert f"drift {CAUSE}" in left
    assert "operation blocks.0 softmax model.py:22" not in left
    page.select_option("#order", "furthest")
    assert sorted(names()) == sorted(left) != names()
    page.click(f"#table button:has-text('{LOSS}')")
    assert page.inner_text("#series-name") == LOSS


@pytest.mark.parametrize("phone", PHONES)
def test_a_telephone_scrolls_in_one_direction(show: Opened, jump: Path, phone: Any) -> None:
    page = show(jump, READY, viewport=phone, has_touch=True)
    page.click("details.help summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    canvas = page.locator("#map").bounding_box()
    assert canvas["width"] <= phone["width"]
    page.touchscreen.tap(*at(page, 250, row_of(LOSS), (JUMP - 160, JUMP + 96)))
    assert page.inner_text("#series-name") == LOSS
    assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["jump", "well"])
def test_accessibility(
    show: Opened, request: pytest.FixtureRequest, name: str, scheme: str
) -> None:
    """axe, which knows the rules of WCAG, finds nothing."""
    axe = needs("axe_playwright_python.sync_playwright").Axe()
    page = show(request.getfixturevalue(name), READY, color_scheme=scheme)
    results = axe.run(page)
    assert results.violations_count == 0, results.generate_report()


def test_the_theme_changes_all_drawings(show: Opened, jump: Path) -> None:
    """Also that of the map, which is painted point by point."""
    image = needs("PIL.Image")
    page = show(jump, READY)

    def brightness() -> list[float]:
        found = []
        for name in ("#loss", "#map", "#series"):
            with image.open(io.BytesIO(page.locator(name).screenshot())) as picture:
                found.append(sorted(picture.convert("L").tobytes())[picture.width * 30])
        return found

    light = brightness()
    page.click("#theme")
    dark = brightness()
    assert min(light) > 200
    assert max(dark) < 60
    page.click("#theme")
    assert brightness() == light


def test_names_are_text(show: Opened, tmp_path: Path) -> None:
    """What comes from a program runs nothing, wherever it stands."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    writer = Writer(tmp_path, about={})
    writer.register(Series(f"operation {evil}", "operation", evil, evil))
    writer.register(Series("loss loss", "loss", "loss", evil, 1))
    for step in range(60):
        writer.add(Row(step, [1.0, 1.0], [1.0, 1.0]))
    writer.event(Event(40, "data", evil, evil, evidence=(evil,)))
    writer.close()
    page = show(page_of(tmp_path), READY)
    page.click("#table button >> nth=0")
    assert "<script>" in page.inner_text("#series-name")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("<script") == 3


def test_a_run_of_ranks_and_of_zeros(show: Opened, tmp_path: Path) -> None:
    """Infinite, zero, never measured, one step: each is a page that opens."""
    writer = Writer(tmp_path, rank=0, about={})
    for i, name in enumerate(("inf", "zero", "some", "nan")):
        writer.register(Series(name, "operation", name, "", i))
    for step in range(80):
        number = float("inf") if step > 60 else 1.0
        some = 2.0 if step % 10 == 0 else float("nan")
        numbers = [number, 0.0, some, float("nan")]
        writer.add(Row(step, numbers, numbers))
    writer.close()
    Writer(tmp_path, rank=1, about={}).close()
    page = show(page_of(tmp_path), READY)
    for name in ("inf", "zero", "some"):
        page.click(f"#table button:has-text('{name}')")
        assert page.inner_text("#series-name") == name
    assert page.locator("#table tbody tr").count() == 3


def test_without_javascript(browser: Any, jump: Path) -> None:
    """The verdict is there, and what is missing is said."""
    page = browser.new_page(java_script_enabled=False)
    page.goto(jump.as_uri())
    assert CAUSE in page.inner_text("header")
    assert "need JavaScript" in page.inner_text(".notice")
    page.close()


def test_ranks_and_resumed_runs(show: Opened, tmp_path: Path) -> None:
    """One chooses the rank. The page opens with the one that saw the event."""
    for rank in range(2):
        for run in range(2):
            writer = Writer(tmp_path, rank=rank, about={})
            writer.register(Series("loss loss", "loss", "loss"))
            for step in range(writer.next_step, writer.next_step + 100):
                number = 64.0 if (rank, step) == (1, 350) else 1.0 + rank
                writer.add(Row(step, [number], [number]))
            if (rank, run) == (1, 1):
                writer.event(Event(350, "data", "loss"))
            writer.close()
    # Each began when nobody else ran, and so behind the others.
    history = fxguard.load_history(tmp_path)
    assert history.ranks == (0, 1)
    page = show(page_of(tmp_path), READY)
    meta = page.inner_text("#meta")
    assert meta.endswith("rank 1 (of 2 ranks), resumed at steps 100, 200 and 300")
    assert page.input_value("#rank") == "1"
    assert page.inner_text("#series-name") == "loss loss"  # a ring is around it
    first = page.locator("#table td.number >> nth=0")
    assert first.inner_text() == "2"
    assert "dotted line" in page.inner_text("#key")
    page.select_option("#rank", "0")
    page.locator("#meta", has_text="rank 0").wait_for()  # a function in words would be evaluated
    page.wait_for_selector(READY)
    assert page.input_value("#rank") == "0"
    assert first.inner_text() == "1"
    assert page.url.endswith("#rank=0")
    history.to_html(tmp_path / "page.html", rank=0)
    page = show(tmp_path / "page.html", READY)
    assert page.inner_text("#meta").startswith("steps 0 to 199, 1 series, rank 0 (of 2 ranks)")
    assert page.locator("#rank").is_hidden()
