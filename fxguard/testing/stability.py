"""Compares one model in two precisions, operation by operation, on the same input."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch

from fxguard import trees
from fxguard.budget.budget import budget_as_it_is
from fxguard.comparison.two_dtypes import TwoDtypes
from fxguard.errors import UsageError
from fxguard.graph.wide_form import converted, is_float
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.install.instrumented import find_guard, unwrapped
from fxguard.install.remove import remove
from fxguard.measure.at_hand import dtype_named
from fxguard.options import Options
from fxguard.testing.result import Stability
from fxguard.testing.watch import Model, as_module

__all__ = ["numerically_stable"]

# The default tolerance in units of the dtype's eps, and its upper bound: 32 roundings of bfloat16
# would be a quarter of the largest element.
ROUNDINGS, MOST = 32, 1 / 16


def numerically_stable(
    model: Model,
    *inputs: Any,
    dtype: torch.dtype | str = torch.float16,
    reference: torch.dtype | str = torch.float64,
    tolerance: float | None = None,
    gradients: bool = False,
    **kwargs: Any,
) -> Stability:
    """Compare every operation of a model in one dtype with itself in a more precise one.

    Weights and floating-point inputs are rounded to ``dtype``; the reference starts from the
    rounded ones, so that only the losses of operations count. Each captured graph runs in both
    precisions, node by node; the reference omits casts between floating-point dtypes. Integers,
    booleans and random numbers are taken over from the run in ``dtype``: a different mask or index
    is not an error by itself.

    The error of a tensor is ``max |x - reference| / max |reference|``.

    With ``gradients=True``, the gradients that each operation returns to its operands are compared
    as well. The backward starts from the ``loss`` that the model returns, or else from all outputs,
    with gradients drawn from a normal distribution: the gradients of a sum would be 0 behind a
    softmax or a layer norm. It goes to weights and floating-point inputs. If operations ran between
    graphs, the backward begins anew at what each graph returned to them.

    The error of a gradient is ``max |g - reference| / max(max |reference|, size)``. The size is the
    gradient's magnitude if nothing cancelled: the largest magnitude in another backward of the
    reference, with the sign of each element drawn at random wherever a gradient enters an operand.
    Gradients that are rightly 0, such as that of a bias before a normalisation, have roundings of
    any relative size.

    Args:
        model: any module, or a function of tensors. A copy runs.
        inputs: positional arguments of the model.
        dtype: the precision that is tested; a name such as "fp16" will do.
        reference: the precision that it is compared with.
        tolerance: the largest allowed error; by default 32 times the dtype's ``eps``, and at most
            1/16 (for bfloat16).
        gradients: whether to also compare gradients.
        kwargs: keyword arguments of the model.

    Returns:
        A result that is True or False, and as text the first operation whose error is larger. If
        that is one of the forward and the reference is float64, it has the error budget of the
        output too: how far off that is, and which lines this comes from.

    Raises:
        FxguardError: when nothing could be compared, or the reference is not more precise. With
            ``gradients=True`` also when no output of the model is differentiable, or an operation
            that writes in place has no kernel for ``reference``.

    Warns:
        RuntimeWarning: when operations were not compared, because they ran between graphs or have
            no kernel for ``reference``.

    Example:
        >>> assert numerically_stable(model, x, dtype=torch.bfloat16)
        >>> print(numerically_stable(RMSNorm(64), x * 1000))
        not stable in float16: pow (norm.py:12) made an inf or a NaN out of 0, against float64
    """
    dtype, reference = dtype_named(dtype), dtype_named(reference)
    if not torch.finfo(reference).eps < torch.finfo(dtype).eps:
        raise UsageError(f"{reference} is not more precise than {dtype}")
    tested = _in_dtype(model, dtype)
    found = TwoDtypes(reference, gradients=gradients)
    options = Options(on_detect=lambda report: None, backward=False)
    guard = GuardedModel(tested, options, Plugins(hear=found.hear))
    guard.install()
    with torch.set_grad_enabled(gradients):
        args, named = trees.tree_map(
            # Clones are not leaves, so the model may write them.
            lambda x: x.requires_grad_(gradients).clone() if is_float(x) else x,
            converted((inputs, kwargs), dtype),
        )
        output = tested(*args, **named)
        if not found.deviations():
            raise UsageError(
                "there is nothing to compare: TorchDynamo captured no operation of this "
                f"{type(tested).__name__}"
            )
        between = guard.counted().between
        if gradients:
            found.differentiate(output, is_cut=between > 0)
    if tolerance is None:
        tolerance = min(ROUNDINGS * torch.finfo(dtype).eps, MOST)
    told = Stability(
        dtype,
        reference,
        tolerance,
        tuple(found.deviations()),
        between,
        found.taken_over,
        found.without_gradient,
    )
    first = told.first
    if first is not None and first.phase == "forward" and reference == torch.float64:
        args, named = converted((inputs, kwargs), dtype)
        told = replace(told, budget=budget_as_it_is(_in_dtype(model, dtype), args, named))
    if between or found.without_kernel:
        warnings.warn(f"not every operation was compared: {told}", RuntimeWarning, stacklevel=2)
    return told


def _in_dtype(model: Model, dtype: torch.dtype) -> torch.nn.Module:
    """A copy of a model in a dtype, without a guard."""
    copied = copy.deepcopy(unwrapped(as_module(model))).to(dtype)
    if find_guard(copied) is not None:
        remove(copied)
    return copied
