"""The cases, by family: each file is one, and its ``cases()`` gives names and runs.

A run may be a group of them: cases that share what takes long to make.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..records import Cases

__all__ = ["FAMILIES", "cases_of"]

FAMILIES = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))


def cases_of(family: str, takes: Callable[[str], bool] = lambda name: True) -> Cases:
    """Names of the cases of a family that are taken, and what to run for each."""
    module = importlib.import_module(f"{__name__}.{family}")
    for title, run in module.cases():
        name = f"{family}/{title}"
        if not takes(name):
            continue
        if callable(run):
            yield name, run
        else:
            yield from ((f"{name}/{each}", one) for each, one in run.cases())
