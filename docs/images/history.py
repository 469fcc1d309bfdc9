"""Take the pictures of histories that docs/history.md shows; needs Chromium, and two minutes.

python docs/images/history.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

import fxguard

IMAGES = Path(__file__).resolve().parent
RUNS = {"jump": [], "healthy": ["--healthy"]}


def main() -> None:
    """Write history-jump.png and history-healthy.png."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, words in RUNS.items():
            kept = Path(folder) / name
            script = str(IMAGES / "history_train.py")
            command = [sys.executable, "-m", "fxguard", "run", "--history", str(kept), script]
            subprocess.run([*command, *words], check=True)
            fxguard.load_history(kept).to_html(kept / "page.html")
            take(browser, kept / "page.html", IMAGES / f"history-{name}.png")
        browser.close()


def take(browser: object, page: Path, image: Path) -> None:
    """The picture of a page, as it opens."""
    shown = browser.new_page(  # type: ignore[attr-defined]
        viewport={"width": 1200, "height": 960}, device_scale_factor=1.5
    )
    shown.goto(page.as_uri())
    shown.wait_for_selector("#map[data-ready]")
    shown.wait_for_timeout(500)
    shown.screenshot(path=image)
    Image.open(image).convert("RGB").quantize(256).save(image, optimize=True)


if __name__ == "__main__":
    main()
