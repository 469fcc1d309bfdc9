"""Take the pictures of histories that docs/history.md shows; needs Chromium, and three minutes.

python docs/images/history.py

The picture of a run that reads files in order needs a Python that has distutils: 3.11 or 3.10.
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
RUNS = {"jump": [], "healthy": ["--healthy"], "in-order": ["--healthy"]}
# What reads files one after the other, in the place of random parts of one text.
IN_ORDER = {
    'text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")': (
        'files = sorted(Path(sysconfig.get_path("stdlib"), "distutils").rglob("*.py"))\n'
        'text = "".join(file.read_text("utf-8") for file in files).encode("ascii", "ignore")'
    ),
    "begin = torch.randint(len(text) - LENGTH - 1, (16, 1))": (
        "begin = LENGTH * torch.arange(16 * step, 16 * step + 16)[:, None]"
    ),
    "import pydoc_data.topics": "import sysconfig\nfrom pathlib import Path",
}


def main() -> None:
    """Write history-jump.png, history-healthy.png and history-in-order.png."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, words in RUNS.items():
            kept = Path(folder) / name
            script = str(IMAGES / "history_train.py")
            if name == "in-order":
                script = in_order(Path(folder))
            command = [sys.executable, "-m", "fxguard", "run", "--history", str(kept), script]
            subprocess.run([*command, *words], check=True)
            fxguard.load_history(kept).to_html(kept / "page.html")
            take(browser, kept / "page.html", IMAGES / f"history-{name}.png")
        browser.close()


def in_order(folder: Path) -> str:
    """The script that reads files one after the other."""
    text = (IMAGES / "history_train.py").read_text(encoding="utf-8")
    for old, new in IN_ORDER.items():
        assert old in text, old
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    return str(script)


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
