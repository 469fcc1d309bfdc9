"""``forecast``: which operations of a model fail in another dtype, found in one run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Module

from fxguard.errors import UsageError
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import converted, is_float
from fxguard.guard.guard import Guard
from fxguard.guard.instrument import remove
from fxguard.guard.instrumented import find_guard, unwrapped
from fxguard.guard.options import Options
from fxguard.guard.plugins import Plugins
from fxguard.measure.at_hand import name_of_dtype
from fxguard.precision._graphs import Graphs
from fxguard.report.forecast import Forecast

__all__ = ["forecast"]

DTYPES = (torch.float16, torch.bfloat16)


def forecast(
    model: Module, *args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any
) -> Forecast:
    """Say which operations of a forward would fail in another dtype, before anybody tries.

    A copy of the model runs in ``dtype``, so that its casts, masks and branches are those of
    ``dtype``. Each operation of its graphs runs on what the operations before it left, and once
    more in float64 on the same operands. Where the two differ by more than roundings, the result
    of float64 goes on in its place: what comes after is not blamed for it, and one run lists
    everything. A value that ``dtype`` does not hold goes on in float64 until one fits.

    - *overflow*: an element is infinite, and finite in float64.
    - *nan*: an element is NaN, and finite in float64.
    - *underflow*: half of all elements that are not 0 in float64 are 0, softmax aside; or one is,
      of an operation that was given a number (an eps) that is 0 in ``dtype``.
    - *rounding*: the largest error is over 32 ``eps`` of the largest element.

    Weights and inputs that ``dtype`` does not hold are listed, too. The model, its buffers and the
    random state stay as they were. What is said holds for the device that the model is on.

    Args:
        model: healthy in its own dtype, in the mode that it is to run in.
        args: what it is given.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        kwargs: what it is given by name.

    Returns:
        What fails, the worst first.

    Raises:
        FxguardError: for another dtype, and when the model does not run in ``dtype`` or TorchDynamo
            captured nothing of it.

    Example:
        >>> print(fxguard.forecast(model, x))
        in float16 1 of 12 operations fail
          mlp.down linear (model.py:14): overflow, needs 131072, float16 holds 65504
    """
    if dtype not in DTYPES:
        raise UsageError(f"forecast takes torch.float16 or torch.bfloat16, and got {dtype}")
    model = unwrapped(model)
    low = copy.deepcopy(model)
    if find_guard(low) is not None:
        remove(low)
    low = low.to(dtype)
    given = (args, kwargs)
    given_low = pytree.tree_map(  # the model may write what it is given
        lambda x: x.clone() if isinstance(x, Tensor) else x, converted(given, dtype)
    )
    graphs = Graphs(_tensors_of(model), _pairs(given_low, given))
    options = Options(on_detect=lambda report: None, backward=False)
    guard = Guard(low, options, Plugins(hear=graphs.hear))
    guard.install()
    with torch.no_grad(), random_state_kept(given):
        try:
            low(*given_low[0], **given_low[1])
        except RuntimeError as error:
            name = type(model).__name__
            raise UsageError(f"{name} does not run in {name_of_dtype(dtype)}: {error}") from error
    if not graphs.operations:
        raise UsageError(
            "there is nothing to forecast: TorchDynamo captured no operation of this "
            f"{type(model).__name__}"
        )
    return graphs.forecast(name_of_dtype(dtype), guard.counted().between)


def _tensors_of(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _pairs(low: Any, given: Any) -> list[tuple[Tensor, Tensor]]:
    """Each floating-point tensor of the inputs, in the dtype and as it was given."""
    leaves = zip(pytree.tree_leaves(low), pytree.tree_leaves(given), strict=True)
    return [pair for pair in leaves if is_float(pair[0])]
