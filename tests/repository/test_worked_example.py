"""The worked example of docs/how-it-works.md is what fxguard prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.golden.second_runs import second_runs

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Names of nodes and what is called in a graph are TorchDynamo's, and of the torch that the page
# names. The other sections are the same with every torch.
NAMES_OF_TORCH = {"graph", "plan", "checked"}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """docs/worked_example.py."""
    spec = importlib.util.spec_from_file_location("worked_example", DOCS / "worked_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["worked_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_example_prints(example: ModuleType) -> None:
    """After a change of the Plan or of a report: ``python docs/worked_example.py --write``.

    The page says how many second runs its report takes.
    """
    page = example.PAGE.read_text(encoding="utf-8")
    shown = {block[2]: block[3] for block in example.SECTION.finditer(page)}
    with second_runs() as runs:
        printed = example.sections()
    assert len(runs) == 5
    assert shown.keys() == printed.keys()
    same_torch = f"torch {'.'.join(torch.__version__.split('.')[:2])}." in page
    for name, text in printed.items():
        if same_torch or name not in NAMES_OF_TORCH:
            assert shown[name] == text, name


def test_a_section_is_put_under_its_marker(example: ModuleType) -> None:
    """What is written can be read again, and the rest of the page stays."""
    page = "before\n<!-- worked example: graph -->\n```text\nold\n```\nafter\n"
    changed = example.with_sections(page, {"graph": "new\n"})
    assert changed == page.replace("old", "new")
    assert [block[3] for block in example.SECTION.finditer(changed)] == ["new\n"]
