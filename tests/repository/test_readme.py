"""The code that README.md and docs/ show runs as it stands there."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path

import pytest

from support.needs import needs
from support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")


def script_of(markdown: str) -> str:
    """The ```python blocks of a page as one script, but for those tagged ```python no-run.

    All other lines are empty, so that line numbers are those of the page.
    """
    lines: list[str] = []
    opened: re.Match[str] | None = None
    for line in markdown.splitlines():
        fence = FENCE.match(line)
        if fence:
            opened = fence if opened is None else None
        shown = opened is not None and not fence and opened["info"].strip() == "python"
        lines.append(line.removeprefix(opened["indent"]) if opened and shown else "")
    assert opened is None, "a code block is not closed"
    return "\n".join(lines)


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, CHANGELOG.md and docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def scripts() -> dict[str, str]:
    """The script of every page that shows Python code."""
    found = {page: script_of(page.read_text(encoding="utf-8")) for page in pages()}
    return {str(page.relative_to(ROOT)): code for page, code in found.items() if code.strip()}


SCRIPTS = scripts()


def test_readme_shows_python_code():
    """README.md has a Python block that runs."""
    assert "README.md" in SCRIPTS


# What comments and sentences of a page say that its code prints.
KEPT = (
    "keep 2 of 5 operations in float32, the rest in float16\n  :mul\n  down:linear\nverified with"
)
PRINTED = {
    "CONTRIBUTING.md": ("checked 2 of 2 operations in 1 graph; the largest number was 1000",),
    "README.md": ("log made -inf (shown_in_README.py:",),
    "docs/recipes.md": (
        "batch 1: log made -inf",
        "then mul made NaN",
        "batch 0: square made 100% of its nonzero elements 0",
        "keep this square in bfloat16 or float32: 3e-08 is 0 in float16 (advice)",
        "batch 3: std in 0 made NaN",
        "A and B agree: no difference beyond roundings in 3 operations, 1 output, 4 gradients",
        "in float16 2 of 5 operations fail",
        "  mul (shown_in_recipes.py:",
        "in bfloat16 none of 5 operations fails",
        "in float8_e4m3fn 3 of 3 matrix products fail\n  gate linear (",
        KEPT,
        "found 3 of 3 planted NaN in 1 graph",
    ),
    "docs/several-processes.md": ("rank 0: batch 0: argument `input` of Linear.forward: 8 +inf",),
}


@pytest.mark.parametrize("page", SCRIPTS)
def test_shown_code_runs(page, tmp_path):
    """The Python blocks of a page run in order, as one script of a process of its own."""
    script = tmp_path / f"shown_in_{Path(page).stem}.py"
    script.write_text(SCRIPTS[page], encoding="utf-8")
    done = run_python(tmp_path, str(script))
    assert done.returncode == 0, f"{page}:\n{done.stdout}{done.stderr}"
    for text in PRINTED.get(page, ()):
        assert text in done.stdout


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Every relative link names a file that exists, and a heading in it."""
    broken = []
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{file}#{anchor}")
    assert broken == []


def test_only_untagged_python_blocks_run():
    """Other languages and blocks tagged no-run are left out; line numbers stay."""
    page = """# A page
```python
a = 1
```
```python no-run
b = 2
```
```console
$ c
```
- in a list
  ```python
  if a:
      d = a
  ```
"""
    shown = [(n, line) for n, line in enumerate(script_of(page).splitlines(), 1) if line]
    assert shown == [(3, "a = 1"), (13, "if a:"), (14, "    d = a")]


def test_shown_output_is_the_real_one(tmp_path):
    """The Python block of docs/reading-a-report.md, saved as gated.py, prints what it says."""
    page = (ROOT / "docs/reading-a-report.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    verdict, frames = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "gated.py").write_text(code, encoding="utf-8")
    done = run_python(tmp_path, "gated.py")
    assert done.stdout == verdict, done.stderr
    assert done.stderr == f"{verdict.removeprefix('batch 0: ')}\n{frames}"


TEXT = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)
NUMBER = re.compile(r"\d[\d.e+-]*")


@pytest.mark.slow
def test_the_picture_of_a_terminal_is_the_real_one():
    """What docs/images/terminal.svg shows is what the two commands print now."""
    needs("rich")
    shown, *made = (
        [NUMBER.sub("0", html.unescape(text)) for text in TEXT.findall(picture)]
        for picture in (
            (ROOT / "docs/images/terminal.svg").read_text(encoding="utf-8"),
            runpy.run_path(str(ROOT / "docs/images/terminal.py"))["picture"](),
        )
    )
    assert [shown] == made
    assert any("loss\xa0nan" in text for text in shown)
    assert any("fix:" in text for text in shown)


def test_the_repair_of_the_readme_repairs(tmp_path):
    """The lines of its diff are a line of examples/train.py, and one with which it stays finite."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [(wrong, right)] = re.findall(r"^```diff\n-(.*)\n\+(.*)\n```", readme, re.MULTILINE)
    script = (ROOT / "examples/train.py").read_text(encoding="utf-8")
    assert wrong in script.splitlines()
    (tmp_path / "train.py").write_text(script.replace(wrong, right), encoding="utf-8")
    done = run_python(tmp_path, "-m", "fxguard", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "step 3: loss " in done.stdout
    assert "nan" not in done.stdout
