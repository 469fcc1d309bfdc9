"""A real browser, and pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.needs import needs, needs_program

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = needs_program(*NAMES)
    with needs("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; whatever it says on the console, and whatever it asks the network, fails."""
    said: list[str] = []
    pages = []

    def open_(path: Path, wait_for: str = "#table tbody", **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **options})
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(wait_for)
        assert asked == [path.as_uri()]
        return page

    yield open_
    for page in pages:
        page.close()
    assert said == []
