"""``forecast``: finds in one run which operations of a model fail in another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.budget.budget import budget_of
from fxguard.errors import UsageError
from fxguard.forecasting._examined import Examined
from fxguard.forecasting._plan import plan_of
from fxguard.graph.wide_form import NotJudged
from fxguard.in_dtype.trials import FLOAT8, Loss
from fxguard.install.instrumented import unwrapped
from fxguard.measure.at_hand import dtype_named, name_of_dtype
from fxguard.report.forecast import Forecast
from fxguard.report.precision_plan import PrecisionPlan

__all__ = ["forecast", "forecast_of_step"]

DTYPES = (torch.float16, torch.bfloat16, *FLOAT8)


def forecast(
    model: Module,
    *inputs: Any,
    dtype: torch.dtype | str = torch.float16,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Forecast:
    """Predict which operations of a model would fail in another dtype.

    A copy of the model runs in ``dtype``, so that its casts, masks and branches are those of
    ``dtype``. Each operation of its graphs runs on the results of the operations before it, and
    again in float64 on the same operands. If the two results differ by more than roundings, the
    float64 result replaces the other: later operations are not blamed for it, and one run lists
    everything. A value that ``dtype`` cannot hold stays in float64 until a later result fits.

    - *overflow*: an element is infinite, and finite in float64.
    - *nan*: an element is NaN, and finite in float64.
    - *underflow*: half of all elements that are not 0 in float64 are 0, except for softmax; or one
      is, in an operation that was given a number (an eps) that is 0 in ``dtype``.
    - *rounding*: the largest error is over 32 ``eps`` of the largest element; or an addend or a
      factor that would count in float32 is lost entirely.

    In float8 only matrix products compute. Their operands and results are cast with one scale for
    each tensor. There the largest error may be 1.5 ``eps``.

    With a loss, each operation's backward also runs alone, on its float64 gradient. An error does
    not count there if the summed terms cancel.

    A forecast in float16 or bfloat16 also says how many digits of the output are left, and if few
    are, because of which lines: see :func:`fxguard.error_budget`.

    Weights and inputs that ``dtype`` cannot hold are listed as well. The model, its buffers and the
    random state stay unchanged. The forecast holds for the device that the model is on.

    Args:
        model: a model that is healthy in its own dtype, in the mode that it is to run in.
        inputs: its positional arguments.
        dtype: ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2``, or a name such as "float16", "fp16", "bf16".
        loss: given to examine the backward as well, also in :meth:`Forecast.plan`: a function of
            what the model returns, or the key or attribute of the loss in it.
        kwargs: its keyword arguments.

    Returns:
        What fails, the worst first.

    Raises:
        FxguardError: for another dtype, when the loss is not a single number, when the model does
            not run in ``dtype``, when TorchDynamo captured nothing of it, and when its graphs
            cannot run in float64.

    Example:
        >>> print(fxguard.forecast(model, x))
        in float16 1 of 12 operations fails
          mlp.down linear (model.py:14): overflow, needs 131072, float16 holds 65504
    """
    dtype = dtype_named(dtype)
    if dtype not in DTYPES:
        raise UsageError(f"forecast takes {', '.join(map(str, DTYPES))}, got {dtype}")
    if not isinstance(model, Module):
        raise UsageError(f"forecast needs a torch.nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    trials = Examined(model, inputs, kwargs, dtype, loss)
    try:
        graphs, between = trials.forecast()
    except NotJudged as reason:  # such as a DTensor among its weights
        raise UsageError(f"there is no forecast: {reason}") from reason

    def plan(autocast: bool, tolerance: float | None) -> PrecisionPlan:
        if dtype in FLOAT8:
            raise UsageError(f"a plan is for float16 and bfloat16, and this forecast is of {dtype}")
        if not autocast:
            return plan_of(trials, graphs, tolerance)
        others = Examined(model, inputs, kwargs, dtype, loss, autocast=True)
        return plan_of(others, others.forecast()[0], tolerance)

    found = graphs.found.forecast(name_of_dtype(dtype), between, plan)
    return found if dtype in FLOAT8 else replace(found, budget=budget_of(trials))


def forecast_of_step(
    model: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    gradients: Sequence[Tensor | None] | None,
) -> Forecast:
    """A forecast of a step whose backward has run, so that the outputs' gradients are known.

    Args:
        model: the model as it was before the step.
        args: what it was given.
        kwargs: likewise.
        dtype: as in :func:`forecast`.
        gradients: gradients of the floating-point tensors that it returned; None without a
            backward.
    """
    trials = Examined(model, args, kwargs, dtype)
    graphs, between = trials.forecast(gradients)
    found = graphs.found.forecast(name_of_dtype(dtype), between)
    return found if dtype in FLOAT8 else replace(found, budget=budget_of(trials))
