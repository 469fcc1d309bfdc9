"""A closer look at one operation that made a bad value: what it read, and what it would need."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxguard.graph import operations
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.tables import CASTS
from fxguard.measure import traceable
from fxguard.measure.details import describe

__all__ = ["needed_by", "reads_masked_row"]

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def needed_by(target: Any, args: Any, kwargs: Any, path: tuple[int, ...] = ()) -> float | None:
    """The largest finite magnitude that an operation makes when it computes in float64.

    It computes on copies, also of what it writes, and the generators are left as they were.

    Args:
        target: the function, or the name of a tensor's method.
        args: what it was given.
        kwargs: likewise.
        path: indices of the result that is asked for, where the operation returns a tuple.

    Returns:
        inf where it is infinite in float64 too; None where it cannot be computed so, and for
        operations that are not torch's own: those may do what no tensor shows.
    """
    if operations.is_custom(target):
        return None
    try:
        if operations.name_of(target) in CASTS:
            return describe(args[0]).largest_finite
        wide_args, wide_kwargs = pytree.tree_map_only(Tensor, _wide, (args, kwargs))
        function = getattr(wide_args[0], target) if isinstance(target, str) else target
        rest = wide_args[1:] if isinstance(target, str) else wide_args
        with random_state_kept((args, kwargs)):
            result = function(*rest, **wide_kwargs)
        for index in path:
            result = result[index]
        if result is None:
            result = wide_args[0]  # it writes, and returns nothing
        if result.dtype in WIDER.values():
            detail = describe(result)
            infinite = detail.posinf_count + detail.neginf_count
            return math.inf if infinite else detail.largest_finite
    except Exception:  # no kernel, no memory, no tensor: then it is not known
        pass
    return None


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(WIDER.get(value.dtype, value.dtype), copy=True)


def reads_masked_row(args: Any, kwargs: Any) -> bool:
    """Whether a floating-point operand holds a row of nothing but -inf.

    The row is along ``dim`` where the operation was given one, else along the last dimension.
    """
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = given if isinstance(given, int) and not isinstance(given, bool) else -1
    try:
        return any(_has_masked_row(value, dim) for value in pytree.tree_leaves((args, kwargs)))
    except Exception:  # a subclass or a layout that knows few operations
        return False


def _has_masked_row(value: Any, dim: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in traceable.FLOATS
        and value.layout is torch.strided
        and -value.dim() <= dim < value.dim()
        and bool((value == -math.inf).all(dim=dim).any())
    )
