"""What a model chose in its dtype, and what float64 would choose: comparisons, routers, argmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_body import with_wide_dtypes
from fxguard.graph.wide_form import Ran, is_float
from fxguard.records import Source
from fxguard.source.lines import source_of_trace

__all__ = ["Chose", "ChoseAt", "at_own_indices", "chosen_otherwise", "chosen_wide"]

COMPARES = {
    *("eq", "ge", "gt", "le", "lt", "ne"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal"),
}
ROUNDS = {
    *("ceil", "fix", "floor", "floor_divide", "frac"),
    *("round", "sgn", "sign", "trunc"),
}
# Operations that return values and their indices: position of `dim`, and its default.
PICKS = {
    "topk": (2, -1),
    "sort": (1, -1),
    "max": (1, None),
    "min": (1, None),
    "median": (1, None),
    "nanmedian": (1, None),
    "kthvalue": (2, -1),
    "mode": (1, -1),
    "cummax": (1, None),
    "cummin": (1, None),
}


@dataclass(slots=True)
class Chose:
    """What an operation chose otherwise."""

    otherwise: int
    of: int
    margin: float


@dataclass(slots=True)
class ChoseAt:
    """What one operation of a graph chose otherwise, in all its runs."""

    kind: str
    module: str
    source: Source | None
    otherwise: int = 0
    of: int = 0
    margin: float = math.nan

    @classmethod
    def of_node(cls, node: Node, kind: str) -> ChoseAt:
        """The operation of a node, which has not run yet."""
        stack = list(nodes.stack_of(node).items())
        module = nodes.path_of(*stack[-1], {}) if stack else ""
        return cls(kind, module, source_of_trace(node.meta.get("stack_trace")))

    def add(self, chose: Chose) -> None:
        """Add what it chose in one run."""
        self.otherwise += chose.otherwise
        self.of += chose.of
        if chose.otherwise and not self.margin >= chose.margin:
            self.margin = chose.margin


def chosen_wide(ran: Ran, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """What an operation chooses on wide operands; None if it cannot be asked."""
    if ran.before is not None or ran.call.written or ran.call.casts:
        return None
    if not any(map(is_float, leaves((args, kwargs)))):
        return None
    try:
        args, kwargs = with_wide_dtypes((args, kwargs), dtype)
        with torch.no_grad():
            return ran.run(*args, **kwargs)
    except theirs():  # no such kernel
        return None


def chosen_otherwise(ran: Ran, args: Any, kwargs: Any, dtype: torch.dtype) -> Chose | None:
    """What an operation chose otherwise than it does on wide operands; None if it chooses nothing.

    Args:
        ran: the operation, as the model ran it.
        args: its arguments in the wide dtype.
        kwargs: likewise.
        dtype: the wide one.
    """
    kind = ran.call.kind.removesuffix("_")
    made = [x for x in leaves(ran.result) if isinstance(x, Tensor)]
    rounds = kind in ROUNDS
    if not (rounds or any(not is_float(x) for x in made)):
        return None
    wide = chosen_wide(ran, args, kwargs, dtype)
    if wide is None:
        return None
    pairs = [
        (low, other)
        for low, other in zip(made, leaves(wide), strict=True)
        if isinstance(other, Tensor) and low.shape == other.shape and (rounds or not is_float(low))
    ]
    found = [(low, other, low.to(other.dtype) != other) for low, other in pairs]
    otherwise = sum(int(differs.sum()) for _, _, differs in found)
    of = sum(low.numel() for low, _, _ in found)
    margin = _margin(kind, ran, args, kwargs, found) if otherwise else 0.0
    return Chose(otherwise, of, margin)


def _margin(
    kind: str, ran: Ran, args: Any, kwargs: Any, found: list[tuple[Tensor, Tensor, Tensor]]
) -> float:
    """The largest distance of what was compared, where it was chosen otherwise."""
    read = next(x for x in leaves((args, kwargs)) if is_float(x)).detach()
    low, other, differs = found[0]
    if kind in COMPARES and len(args) > 1:
        second = args[1].detach() if isinstance(args[1], Tensor) else args[1]
        gap, size = (read - second).abs(), float(read.abs().max())
        gap = gap.expand(differs.shape)[differs]
    elif low.dtype == torch.int64 and (dim := _dim_of(ran, low)) is not None:
        one, two = _gathered(read, dim, low), _gathered(read, dim, other)
        gap, size = (one - two).abs().flatten(), float(read.abs().max())
    else:
        return math.nan
    gap = gap[gap.isfinite()]
    return float(gap.max()) / size if gap.numel() and size else math.nan


def at_own_indices(ran: Ran, args: Any, kwargs: Any, result: Any) -> Any:
    """The wide result of an operation that picks, of the elements that the model has picked."""
    if ran.call.kind not in PICKS or not isinstance(ran.result, (tuple, list)):
        return result
    values, indices = ran.result[0], ran.result[1]
    dim = _dim_of(ran, indices)
    if dim is None:
        return result
    read = next(x for x in leaves((args, kwargs)) if is_float(x))
    picked = _gathered(read, dim, indices).reshape(values.shape)
    return type(result)([picked, indices]) if type(result) in (tuple, list) else (picked, indices)


def _dim_of(ran: Ran, indices: Tensor) -> int | None:
    """The dimension in which an operation picks; None for all of them, or if it is not known."""
    position, default = PICKS.get(ran.call.kind, (1, None))
    given = ran.args[position] if len(ran.args) > position else ran.kwargs.get("dim", default)
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _gathered(read: Tensor, dim: int, indices: Tensor) -> Tensor:
    """The elements at some indices; of reduced ones, in a dimension of one element."""
    if indices.dim() < read.dim():
        indices = indices.unsqueeze(dim)
    return read.gather(dim, indices)
