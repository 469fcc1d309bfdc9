"""The blamed operation as a failing test: what is written, and what is said instead."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import fxguard
from support.stories.bad_before import GIVEN
from support.stories.overflows import OVERFLOW
from support.stories.poles import POLES
from support.stories.rounded import PRECISION

from ..folders import empty_folder
from ..records import Cases, Record, guarded, of_reports
from .stories import model_of

STORIES = {**OVERFLOW, **PRECISION, **POLES, **GIVEN}
EVERY = 5  # each writes a test and runs it in a new process


def cases() -> Cases:
    """With the option, by the method, with numbers of the same ranges only."""
    for place, name in enumerate(STORIES):
        if place % EVERY == 0:
            yield f"{name}/option", functools.partial(by_option, name)
        if place % EVERY == 2 and place % 2:
            yield f"{name}/ranges", functools.partial(by_option, name, reproduce_ranges_only=True)
        if place % EVERY == 4 and place % 2:
            yield f"{name}/method", functools.partial(by_method, name)


def by_option(name: str, **options: Any) -> Record:
    """What stands in the folder that ``reproduce_to`` names."""
    with empty_folder() as folder:
        story = STORIES[name]
        record = guarded(
            model_of(story.forward),
            lambda model: model(*story.inputs),
            reproduce_to=folder,
            **options,
        )
        return {**record, **written(folder)}


def by_method(name: str) -> Record:
    """What :meth:`Report.reproduce` writes."""
    story = STORIES[name]
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(model_of(story.forward), on_detect=reports.append)
    model(*story.inputs)
    fxguard.remove(model)
    with empty_folder() as folder:
        path = reports[0].reproduce(folder)
        return {**of_reports(reports), "path": path.name, **written(folder)}


def written(folder: Path) -> Record:
    """The tests as text, and the tensors beside them."""
    tests = {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}
    others = sorted(path for path in folder.iterdir() if path.suffix != ".py")
    return {"tests": tests, "operands": {path.name: operands(path) for path in others}}


def operands(path: Path) -> str:
    """The tensors in a file."""
    return str(torch.load(path, weights_only=True)) if path.suffix == ".pt" else path.suffix
