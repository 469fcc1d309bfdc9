"""Elements that one operation made 0 and that are not 0 in float64 on the same operands.

The cost is small if nothing is lost: an operation is computed in float64 only if at least the
requested share of its result is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.graph.closer_look import evidence_at
from fxguard.graph.evidence import Evidence
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.tables import MOVES, SELECTS, UNINITIALISED, VANISHES
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import dtype_of
from fxguard.measure.func_levels import without_levels

__all__ = ["KEEPS_ZEROS", "Lost", "Results", "lost_alone", "lost_in", "may_have_lost", "why_not"]

WIDE = torch.float64
CHECK = torch.float32  # numbers that are not rounding noise are the same here, or too small

# Zeros of these are right, or come from an operand, or are accidental.
KEEPS_ZEROS = MOVES | SELECTS | UNINITIALISED | {"embedding"}

# Gives the results of an operation in the model's form and in a wide dtype, as pairs.
Results = Callable[[torch.dtype], Sequence[tuple[Any, Any]]]


@dataclass(frozen=True, slots=True)
class Lost:
    """The loss of one operation."""

    share: float  # of the elements that are not 0 in float64
    largest: float  # magnitude of the lost elements, in float64
    evidence: Evidence  # the numbers at the largest of them; its `share` is how many are lost


def may_have_lost(kind: str, made: Any, share: float) -> bool:
    """Whether a result has so many zeros that they could be the given share of its finite elements.

    Args:
        kind: kind of the operation.
        made: one of its results.
        share: the share that is asked for.

    Raises:
        NotJudged: for tensors whose elements cannot be counted.
    """
    if kind in KEEPS_ZEROS or kind in VANISHES or not is_float(made):
        return False
    low = without_levels(made)
    if low.layout is not torch.strided or low.is_nested:
        raise NotJudged("a tensor that is sparse or nested")
    if low.is_complex() or low.dtype is WIDE or not low.numel():
        return False
    low = _comparable(low)
    zeros = int((low == 0).sum())
    return zeros > 0 and zeros >= share * int(low.isfinite().sum())


def lost_in(
    results: Results,
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    share: float,
    samples: int | None = None,
) -> Lost | None:
    """The loss of an operation, for the result with the largest loss.

    Args:
        results: computes the results.
        call: the operation.
        args: its arguments as the model had them before it ran.
        kwargs: likewise.
        share: share of the elements that are not 0 in float64; a smaller loss gives None.
        samples: the number of samples in the batch of the model's inputs.

    Raises:
        NotJudged: when it cannot be computed in float64.
    """
    checked: Sequence[tuple[Any, Any]] | None = None
    worst: Lost | None = None
    for position, (made, wide) in enumerate(results(WIDE)):
        if not may_have_lost(call.kind, made, share) or not is_float(wide):
            continue
        low, high = without_levels(made), without_levels(wide)
        sizes = high.abs().where(high.isfinite(), 0.0)
        lost = (_comparable(low) == 0) & (sizes > 0)
        if not bool(lost.any()) or _share_of(lost, sizes) < share:
            continue
        if checked is None:
            checked = results(CHECK)
        sizes = sizes.where(~lost | _is_no_noise(sizes, checked[position][1]), 0.0)
        lost &= sizes > 0
        count, found = int(lost.sum()), _share_of(lost, sizes)
        if not count or found < share or (worst and worst.evidence.share >= count):
            continue
        sizes = sizes.where(lost, 0.0)
        index = tuple(map(int, torch.unravel_index(sizes.argmax(), sizes.shape)))
        bare, named = trees.tree_map_only(Tensor, without_levels, (args, dict(kwargs)))
        evidence = evidence_at(index, call, bare, named, low, same=high, samples=samples)
        worst = Lost(found, float(sizes.max()), replace(evidence, share=count))
    return worst


def lost_alone(
    call: Call, function: Callable[..., Any], made: Any, share: float
) -> Lost | str | None:
    """The same for an operation that ran by itself and has not written its operands.

    Args:
        call: the operation, with the tensors that it read.
        function: the called function.
        made: what it returned.
        share: as for :func:`lost_in`.

    Returns:
        The loss, None if there is none, or the reason why it is unknown.
    """
    ran = Ran(call, function, function, call.args, call.kwargs, made)

    def results(dtype: torch.dtype) -> Sequence[tuple[Any, Any]]:
        args, kwargs = widened((call.args, dict(call.kwargs)), dtype)
        return list(zip(leaves(made), leaves(wide_result(ran, args, kwargs, dtype)), strict=True))

    try:
        if not any(may_have_lost(call.kind, each, share) for each in leaves(made)):
            return None
        if call.random:
            raise NotJudged(f"{call.kind} draws random numbers")
        return lost_in(results, call, call.args, call.kwargs, share)
    except theirs() as error:  # no error here may end a batch
        return why_not(error)


def why_not(error: Exception) -> str:
    """Why an operation, or what follows it, is not judged."""
    if isinstance(error, NotJudged):
        return str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out of memory"
    return f"a second run raised {type(error).__name__}"


def _share_of(lost: Tensor, sizes: Tensor) -> float:
    return float(lost.sum()) / max(1, int((sizes > 0).sum()))


def _is_no_noise(sizes: Tensor, checked: Tensor) -> Tensor:
    """Where numbers are not just remainders of cancellation, rounded in float64.

    The instance norm of a constant row is 1e-13 in float64, and should be 0. Float32 gives a
    different remainder.

    Args:
        sizes: magnitudes in float64.
        checked: the result of the operation in float32.
    """
    other = without_levels(checked).abs().to(WIDE)
    agrees = (other - sizes).abs() <= sizes / 2
    return agrees | (sizes < torch.finfo(CHECK).tiny)


def _comparable(low: Tensor) -> Tensor:
    """A tensor in a dtype that can be compared, which float8 cannot."""
    return low.float() if dtype_of(low).startswith("float8") else low
