"""``fxguard run --json FILE``: what a run has checked and found, as one record."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxguard.cli._ending import say
from fxguard.cli._processes import Note
from fxguard.cli._statuses import Status
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.forecast import Forecast
from fxguard.report.recorded_step import RecordedStep
from fxguard.report.strict_json import recorded, write_json

__all__ = ["record_of_first_step", "record_of_run", "status_of", "write_record"]


def status_of(error: BaseException | None) -> int:
    """The exit status with which Python ends after an exception, as shells report it."""
    if error is None:
        return Status.FINE
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return Status.FAILED
    code = error.code
    return code if isinstance(code, int) else int(code is not None)


def record_of_run(note: Note, status: int) -> dict[str, Any]:
    """A watched run.

    Args:
        note: what all of its processes have checked and found.
        status: how it ends.
    """
    return _record(
        status,
        note.lines,
        detections=note.detections,
        report=note.report,
        quiet_faults=[fault.to_dict() for fault in note.quiet_faults],
        checked=note.summary.to_dict(),
    )


def record_of_first_step(
    found: Sequence[Forecast | ErrorBudget | RecordedStep], status: int
) -> dict[str, Any]:
    """A run that ends after its first step: ``--forecast``, ``--error-budget``, ``--record``."""
    return _record(
        status,
        [line for each in found for line in each.verdict],
        forecasts=[each.to_dict() for each in found if isinstance(each, Forecast)],
        error_budgets=[each.to_dict() for each in found if isinstance(each, ErrorBudget)],
    )


def _record(status: int, verdict: list[str], **found: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"detections": [], "report": None, "checked": None}
    nothing |= {"quiet_faults": [], "forecasts": [], "error_budgets": []}
    return recorded("run", {"status": int(status), "verdict": verdict, **nothing, **found})


def write_record(file: str, record: dict[str, Any]) -> None:
    """Write the record of a run, under torchrun into one file for each rank."""
    path = Path(file)
    if (rank := os.environ.get("RANK", "0")) != "0":
        path = path.with_stem(f"{path.stem}-rank{rank}")
    try:
        write_json(path, record)
    except OSError as error:
        say(f"the record could not be written: {error}")
