"""Runs one operation again, on other operands or in float64, and returns what it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._recorded import copied, values_of
from fxguard.comparison._rounding import in_double
from fxguard.formats import limit_of
from fxguard.graph.nodes import memory_of
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import Ran, converted, is_float, wide_result, widened
from fxguard.measure.at_hand import dtype_of

__all__ = [
    "as_dtypes_of",
    "at_limit",
    "evaluated",
    "in_float64",
    "shares_memory",
    "spread",
    "with_eps_of",
]

# How many times operands are perturbed by a rounding, to see how far a result moves.
TRIALS = 2
LEAST = 2.0**-44  # the smallest of these perturbations: 256 roundings of float64
NEARLY = 0.99  # of a dtype's largest number, which masks are made of


def evaluated(ran: Ran, node: Node, args: Any, kwargs: Any, state: RandomState | None) -> list[Any]:
    """What an operation leaves in the dtypes of its operands: its results, and what it writes.

    Args:
        ran: the operation.
        node: its node.
        args: what it reads; not written.
        kwargs: likewise.
        state: the random state to begin with; None if the operation draws nothing.
    """
    args, kwargs = copied((args, kwargs)) if ran.call.written else (args, kwargs)
    after = RandomState.now((args, kwargs)) if state is not None else None
    try:
        if state is not None:
            state.restore()
        with torch.no_grad():
            result = ran.run(*args, **kwargs)
    finally:
        if after is not None:
            after.restore()
    return values_of(result, ran.call, _operands(node, args, kwargs).__getitem__)


def in_float64(ran: Ran, node: Node, args: Any, kwargs: Any) -> list[Any]:
    """What an operation leaves in float64.

    Raises:
        NotJudged: when float64 has no answer.
    """
    args, kwargs = widened((args, kwargs), torch.float64)
    args, kwargs = copied((args, kwargs)) if ran.call.written else (args, kwargs)
    with torch.no_grad():
        result = wide_result(ran, args, kwargs, torch.float64)
    return values_of(result, ran.call, _operands(node, args, kwargs).__getitem__)


def spread(
    ran: Ran, node: Node, args: Any, kwargs: Any, unit: float, wide: list[Any]
) -> list[Tensor | None]:
    """How far each result moves in float64 when operands move by one rounding.

    Operands move by at least ``LEAST``, which float64 can tell from 1, and what results move by
    counts in proportion.

    Args:
        ran: the operation.
        node: its node.
        args: what it reads.
        kwargs: likewise.
        unit: half the eps of a dtype.
        wide: what it leaves in float64.

    Raises:
        NotJudged: when float64 has no answer.
    """
    generator = torch.Generator().manual_seed(0)
    by = max(unit, LEAST)

    def moved(x: Tensor) -> Tensor:
        if not is_float(x):
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8) * 2 - 1
        return x * (1 + by * signs.to(x.device, torch.float64))

    found: list[Tensor | None] = [None] * len(wide)
    for _ in range(TRIALS):
        wide_args = widened((args, kwargs), torch.float64)
        made = in_float64(ran, node, *trees.tree_map_only(Tensor, moved, wide_args))
        for place, (one, other) in enumerate(zip(made, wide, strict=True)):
            if not is_float(other):
                continue
            gap = (in_double(one) - in_double(other)).abs()
            gap = gap.nan_to_num(0.0, posinf=0.0) * (unit / by)
            known = found[place]
            found[place] = gap if known is None else torch.maximum(known, gap)
    return found


def with_eps_of(ran: Ran, dtype: torch.dtype | None) -> Ran:
    """An operation whose default eps is that of another dtype; None leaves it as it is.

    The same norm has another eps in another dtype, and is the same operation all the same.
    """
    if dtype is None or ran.call.kind != "rms_norm":
        return ran
    return replace(ran, args=converted(ran.args, dtype), kwargs=converted(dict(ran.kwargs), dtype))


def as_dtypes_of(values: Any, like: Any) -> Any:
    """Values rounded to the dtypes of others; a dtype's largest number becomes the other's."""

    def cast(x: Any, model: Any) -> Any:
        if not is_float(x) or not is_float(model) or x.dtype == model.dtype:
            return x
        made = x.to(model.dtype)
        if x.dtype.is_complex or model.dtype.is_complex:
            return made
        masks = at_limit(x)
        limit = torch.finfo(model.dtype).max
        return torch.where(masks, limit * x.sign().to(made.dtype), made) if masks.any() else made

    try:
        return trees.tree_map(cast, values, like)
    except ValueError:  # the structures differ
        return values


def at_limit(x: Tensor) -> Tensor:
    """Elements that hold the largest number of their dtype, as masks do."""
    size = x.abs()
    return (size >= NEARLY * limit_of(dtype_of(x))) & size.isfinite()


def shares_memory(ran: Ran) -> bool:
    """Whether a result shares the memory of an operand."""
    read = {memory_of(x) for x in _tensors((ran.args, dict(ran.kwargs)))} - {None}
    return any(memory_of(x) in read for x in _tensors(ran.result))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in trees.tree_leaves(values) if isinstance(x, Tensor))


def _operands(node: Node, args: Any, kwargs: Any) -> dict[Node, Any]:
    return dict(_pairs((node.args, dict(node.kwargs)), (args, kwargs)))


def _pairs(structure: Any, values: Any) -> Iterator[tuple[Node, Any]]:
    """Each node among some arguments, with the value in its place."""
    if isinstance(structure, Node):
        yield structure, values
    elif isinstance(structure, (tuple, list)):
        for one, value in zip(structure, values, strict=True):
            yield from _pairs(one, value)
    elif isinstance(structure, Mapping):
        for key, one in structure.items():
            yield from _pairs(one, values[key])
