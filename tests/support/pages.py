"""Pages for tests of what a reader sees, and pictures of them.

    PYTHONPATH=tests python tests/support/pages.py

takes the pictures in tests/report/screenshots again. Look at them before you keep them.
"""

from __future__ import annotations

import math
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fxguard.types import Frame, Row, Source, Trace, TracedBatch

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SCENES = {name: {"desk": DESK, "phone": PHONE} for name in ("cause", "batches")}
CAUSE = 150  # index of the frame that is blamed
KINDS = ("linear", "gelu", "linear", "mul", "linear", "add", "layer_norm", "matmul", "softmax")
VERDICT = (
    "mul in block.16.ff made inf (model.py:31): overflow",
    "  model.py:31: hidden = gate * up",
    "  at [0, 6, 114]: 188.0 * -369.2 is -69419 in float64 (and 31 more; sample 0)",
    "  fix: keep `block.16.ff` in float32 or bfloat16: float16's maximum is 65504 (advice)",
    "  it needs 1.11e+05, 1.69 times what float16 holds (65504)",
    "  it read input[0] up to 4.59e+02, input[1] up to 4.60e+02",
    "  output: 0 NaN, 22 +inf, 10 -inf of 131072 elements; largest finite magnitude 6.502e+04",
    "  it spread to block.16.ff linear, block.16 add and 90 more; the model returned it",
    "  why: in float32 it is finite (at most 1.11e+05): precision",
    "then linear in block.16.ff made NaN (model.py:32) of it",
)


def batch(number: int, scale: float, *, fails: bool) -> TracedBatch:
    """A model of which the magnitudes rise and fall, and in the end leave float16."""
    frames = []
    for i in range(240):
        kind = KINDS[i % len(KINDS)] if i != CAUSE else "mul"
        high = scale * 10 ** (1.2 + 1.1 * math.sin(i / 7) + max(0, 1.6 - abs(CAUSE - 1 - i) / 9))
        bad = fails and i >= CAUSE
        rows = (
            Row("input[0]", 1e-3, high / 2, dtype="float16"),
            Row("output", 1e-3 * high, math.inf if i == CAUSE and fails else high, dtype="float16"),
        )
        if bad and i > CAUSE:
            rows = (rows[0], Row("output", math.nan, math.nan, dtype="float16"))
        source = Source("/project/model.py", 20 + i % 30, f"hidden = {kind}(hidden)")
        frames.append(Frame(f"block.{i // 9}.ff", kind, True, rows, source, number))
    root = Frame("", "T5", False, (frames[-1].rows[-1],), None, number)
    verdict, blamed = (VERDICT, (CAUSE,)) if fails else ((), ())
    return TracedBatch(number, (*frames, root), number, verdict, blamed)


@cache
def scene(name: str) -> Trace:
    """A trace of one batch that fails, or of five of which the fourth does."""
    if name == "cause":
        return Trace("T5", None, "2.13.0", (batch(0, 1.0, fails=True),))
    scales = (0.5, 0.6, 0.8, 1.0, 1.1)
    batches = (batch(i, scale, fails=i == 3) for i, scale in enumerate(scales))
    return Trace("T5", None, "2.13.0", tuple(batches))


def main() -> None:
    """Take the pictures."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    kept = Path(__file__).resolve().parents[1] / "report" / "screenshots"
    kept.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, devices in SCENES.items():
            path = Path(folder) / f"{name}.html"
            scene(name).to_html(path)
            for device, viewport in devices.items():
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport=viewport, color_scheme=scheme)
                    page.goto(path.as_uri())
                    page.wait_for_selector("#table tbody")
                    page.wait_for_timeout(200)
                    picture = kept / f"{name}-{device}-{scheme}.png"
                    page.screenshot(path=picture)
                    Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
