"""Take the pictures of HTML pages that the documents show; needs Chromium.

python docs/images/page.py
"""

from __future__ import annotations

import copy
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import fxguard

IMAGES = Path(__file__).resolve().parent
EXAMPLE = IMAGES.parent.parent / "examples" / "byt5_overflow.py"


def pages(folder: Path) -> tuple[Path, ...]:
    """The page of the overflow, and two that compare float32 with float16: ranges, elements."""
    command = [sys.executable, "-m", "fxguard", "run", "--trace-to", folder, EXAMPLE]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # ends with a detection
    [trace] = folder.glob("*.jsonl")
    trace.write_text(without_home(trace.read_text()))
    fxguard.load_trace(trace).to_html(folder / "trace.html")

    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    model = example["make_model"]().eval()
    tokens = example["text_batches"]()[0]
    half = copy.deepcopy(model).half()
    found = fxguard.compare(model.float(), half, input_ids=tokens, labels=tokens)
    for name, each in (("diff", found.ranges), ("comparison", found)):
        each.to_html(folder / f"{name}.html")
        page = folder / f"{name}.html"
        page.write_text(without_home(page.read_text()))
    return tuple(folder / f"{name}.html" for name in ("trace", "diff", "comparison"))


def without_home(text: str) -> str:
    """Paths as they would be in a virtual environment of yours."""
    return text.replace(str(Path(torch.__file__).parent.parent), "/venv/lib/site-packages")


def main() -> None:
    """Write page.png, page-diff.png and page-comparison.png."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        names = ("page", "page-diff", "page-comparison")
        for path, name in zip(pages(Path(folder)), names, strict=True):
            page = browser.new_page(
                viewport={"width": 1200, "height": 940}, device_scale_factor=1.5
            )
            page.goto(path.as_uri())
            page.wait_for_selector("table tbody")
            page.wait_for_timeout(500)
            path = IMAGES / f"{name}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
