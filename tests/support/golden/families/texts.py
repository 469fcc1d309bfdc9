"""The documents: the worked example, the famous NaNs, the symptoms, the examples."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import ModuleType
from typing import Any

from support.programs import ROOT, run_python

from ..folders import empty_folder
from ..records import Cases, Record, guarded
from ..second_runs import second_runs
from .run import without_warnings

BLOCK = re.compile(r"^```(?P<info>[^\n]+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'python title="([^"]+)"')
MODULES = {"python": [], "fxguard": ["-m", "fxguard"]}  # other commands need ranks or pytest
TOO_LONG = "only-when-compiled"


def cases() -> Cases:
    """Texts that pages show, and reports behind them."""
    yield "worked example", worked_example
    stories = document("famous_nans")
    for name in stories.STORIES:
        yield f"famous/{name}", functools.partial(famous, name)
        yield f"famous/{name}/fixed", functools.partial(famous, name, "_fixed")
        yield f"famous/{name}/replay", functools.partial(famous, name, replay=True)
    for page in sorted((ROOT / "docs" / "symptoms").glob("*.md")):
        if page.stem != TOO_LONG:
            yield f"symptoms/{page.stem}", functools.partial(commands, page.read_text("utf-8"))


def document(name: str) -> ModuleType:
    """A program of docs/."""
    docs = str(ROOT / "docs")
    if docs not in sys.path:
        sys.path.append(docs)
    return importlib.import_module(name)


def worked_example() -> Record:
    """The sections of docs/how-it-works.md, and who began the second runs of its report."""
    example = document("worked_example")
    with second_runs() as runs:
        texts = dict(example.sections())
    lines = [f"the worked example: {len(runs)} second runs", *(f"  {run}" for run in runs)]
    return {"text": texts, "begun by": lines}


def famous(name: str, suffix: str = "", **options: Any) -> Record:
    """The report on one batch of a famous NaN, or on its fix."""
    stories = document("famous_nans")
    inputs = stories.part(name, "_inputs")()

    def call(model: Any) -> None:
        made = model(*inputs)
        if stories.STORIES[name].phase == "backward":
            made.backward()

    return guarded(stories.model(name, suffix), call, **options)


def commands(page: str) -> Record:
    """What the commands of a page print, in a folder with the files of the page."""
    blocks = [(block["info"], block["text"]) for block in BLOCK.finditer(page)]
    lines = [
        line.removeprefix("$ ")
        for info, text in blocks
        if info == "console"
        for line in text.splitlines()
        if line.startswith("$ ")
    ]
    printed: Record = {}
    with empty_folder() as folder:
        for info, text in blocks:
            if title := TITLE.fullmatch(info):
                (folder / title[1]).write_text(text, encoding="utf-8")
        for line in lines:
            first, *words = line.split()
            if first in MODULES:
                argv = [*MODULES[first], *words]
                done = run_python(folder, *argv, env={"COLUMNS": "80"}, as_one=True)
                printed[line] = {"status": done.returncode, "text": without_warnings(done.stdout)}
    return printed
