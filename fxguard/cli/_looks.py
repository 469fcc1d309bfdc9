"""``fxguard run --forecast`` and ``--error-budget``: what is said of the first step of a script."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from fxguard import trees
from fxguard.budget.budget import budget_of_step
from fxguard.cli._first_step import Call, FirstStep
from fxguard.cli._loss_of_step import LossOfStep
from fxguard.forecasting.forecast import forecast_of_step
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.forecast import Forecast

__all__ = ["error_budget", "forecast"]


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
