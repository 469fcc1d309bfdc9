"""What is said of the first step of a script: ``--forecast``, ``--error-budget``, ``--record``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from fxguard import trees
from fxguard.budget.budget import budget_of_step
from fxguard.cli._first_step import Call, FirstStep
from fxguard.cli._loss_of_step import LossOfStep
from fxguard.forecasting.forecast import forecast_of_step
from fxguard.recording.folder import need_safetensors, refuse_to_overwrite, write_folder
from fxguard.recording.ranks import folder_of_rank
from fxguard.recording.running import recorded
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.forecast import Forecast
from fxguard.report.recorded_step import RecordedStep

__all__ = ["error_budget", "forecast", "record"]

MAX_BYTES = 2**30  # of a record


def forecast(dtype: str, report: Path | None) -> FirstStep:
    """Says which operations would fail in a dtype: "float16", "float8_e4m3fn"."""

    def look(call: Call) -> Forecast:
        gradients = None
        if call.gradients:
            gradients = [call.gradients.get(position) for position in range(call.outputs)]
        return forecast_of_step(
            call.model(), call.args, call.kwargs, getattr(torch, dtype), gradients
        )

    return FirstStep(look, report)


def error_budget(dtype: str, report: Path | None) -> FirstStep:
    """Says how wrong the loss would be in a dtype, and which lines that comes from."""

    def look(call: Call) -> ErrorBudget:
        args, kwargs = trees.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
        found = budget_of_step(call.model(), args, kwargs, getattr(torch, dtype), call.loss)
        return found if call.loss is None else dataclasses.replace(found, of="the loss")

    return FirstStep(look, report, LossOfStep())


def record(folder: Path, report: Path | None, batches: Sequence[int]) -> FirstStep:
    """Writes what each model computed into a folder; that of a second model has a number.

    Args:
        folder: for the record; if there are several batches, for one folder each, ``batch-0``. Of
            several ranks, each writes ``rank-N`` in there.
        report: likewise as elsewhere.
        batches: the numbers of steps, from 0.

    Raises:
        FxguardError: if something is at the path already, or safetensors is not installed.
    """
    need_safetensors()
    refuse_to_overwrite(folder_of_rank(folder))
    counts = Counter[int]()

    def look(call: Call) -> RecordedStep:
        counts[call.step] += 1
        path = folder if len(batches) == 1 else folder / f"batch-{call.step}"
        if counts[call.step] > 1:
            path = path.with_name(f"{path.name}-{counts[call.step]}")
        args, kwargs = trees.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
        found, _ = recorded(call.model(), args, kwargs, MAX_BYTES, of=call.loss)
        path = folder_of_rank(path)
        write_folder(found, path)
        return RecordedStep(
            str(path),
            len(found.operations),
            len(found.values),
            len(found.data),
            "" if call.loss is None else "the loss",
        )

    return FirstStep(look, report, LossOfStep(), batches)
