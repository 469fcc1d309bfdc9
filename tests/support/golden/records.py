"""One record: what one case gives, as plain data."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxguard
from support.ways import EAGER, prepared, the_way

from .second_runs import second_runs

__all__ = [
    "Cases",
    "Group",
    "Record",
    "Run",
    "guarded",
    "of_reports",
    "of_result",
    "raised_by",
    "recorded",
]

TIMED = "fxguard: capturing "  # a line that is printed only where the processor takes long

Record = dict[str, Any]
Run = Callable[[], Record]
Cases = Iterator[tuple[str, "Run | Group"]]


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share what takes long to make: taken or left as one."""

    cases: Callable[[], Cases]


def recorded(run: Run) -> Record:
    """What a run gives, with what it prints, its warnings and the number of its second runs."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as given,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        second_runs() as runs,
    ):
        warnings.simplefilter("always")
        record = raised_by(run)
    ours = [str(each.message) for each in given if "fxguard" in str(each.message).lower()]
    lines = printed.getvalue().splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith(TIMED))
    return {"printed": said, **record, "warnings": ours, "runs": len(runs)}


def raised_by(run: Run) -> Record:
    """What a run gives, or the exception that it raises."""
    try:
        return run()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def guarded(
    model: nn.Module, call: Callable[[Any], Any], *, way: str = EAGER, **options: Any
) -> Record:
    """The record of a model that is instrumented, called and set free."""
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(model, **{"on_detect": reports.append, **options})

    def run() -> Record:
        with the_way(way):
            call(prepared(model, way))
        return {}

    try:
        return {**raised_by(run), **of_reports(reports, model)}
    finally:
        fxguard.remove(model)


def of_reports(reports: Sequence[fxguard.types.Report], model: nn.Module | None = None) -> Record:
    """Some reports, and what the guard of a model knows."""
    record: Record = {
        "reports": [json.loads(report.to_json()) for report in reports],
        "texts": [str(report) for report in reports],
        "lines": [report.one_line for report in reports],
    }
    guard = None if model is None else fxguard.guard_of(model)
    if guard is not None:
        record["coverage"] = guard.coverage()
        record["notes"] = [str(note) for note in guard.notes]
        try:
            record["frames"] = [repr(frame) for frame in guard.frames()]
        except fxguard.FxguardError as reason:  # replay=True has measured no operations
            record["frames"] = [str(reason)]
    return record


def of_result(found: Any) -> Record:
    """A comparison, a forecast, a plan: a result that is text and JSON."""
    return {"json": json.loads(found.to_json()), "text": str(found)}


def of_files(folder: Path) -> Record:
    """The text files in a folder, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "files": {
            str(path.relative_to(folder)): path.read_text("utf-8", "replace") for path in files
        }
    }
