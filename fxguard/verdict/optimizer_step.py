"""What an optimizer's step made of a weight and, if that is bad, why and what to do about it.

It is read after the step, from the gradients and moments that the step used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.frames import row_of
from fxguard.findings import Fix, Origin
from fxguard.formats import LIMITS
from fxguard.measure.at_hand import dtype_of, own_arithmetic
from fxguard.measure.details import describe
from fxguard.records import Frame, Severity, Source
from fxguard.verdict.explain import with_counts
from fxguard.verdict.forgiving import or_else

__all__ = ["SteppedWeight", "frame_of_step", "origin_of_step"]

MOST_NAMES = 3  # of weights

# Moments by whose square root an optimizer divides, by name in the optimizer's state: Adam and its
# family, RMSprop and Adadelta, Adagrad.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True, slots=True)
class SteppedWeight:
    """A weight after an optimizer's step; it was finite before."""

    name: str
    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Any]  # the optimizer's state for this weight
    group: Mapping[str, Any]  # its settings
    severity: Severity = Severity.FINITE


def frame_of_step(
    optimizer: str, stepped: SteppedWeight, source: Source | None, batch_number: int, index: int = 0
) -> Frame:
    """The frame of a step: the gradient and moments of a weight, and the weight afterwards.

    Args:
        optimizer: name of its class.
        stepped: the weight.
        source: the line that made the step.
        batch_number: number of the last batch.
        index: index of the frame among those of the step.
    """
    moments = [(key, x) for key, x in stepped.state.items() if isinstance(x, Tensor) and x.dim()]
    tensors = [("grad", stepped.gradient), *moments, ("output", stepped.weight)]
    with own_arithmetic():
        rows = tuple(row_of(label, tensor) for label, tensor in tensors)
    return Frame(
        stepped.name, optimizer, True, rows, source, batch_number, index, phase="optimizer"
    )


def origin_of_step(
    optimizer: str,
    weights: Sequence[SteppedWeight],
    source: Source | None,
    batch_number: int,
    *,
    saw_gradients: bool,
) -> Origin:
    """Describe for the user what a step has done.

    Args:
        optimizer: name of its class.
        weights: at least one; the first one is examined closely.
        source: the line that made the step.
        batch_number: number of the last batch.
        saw_gradients: whether gradients were checked at the end of their backward and were finite.
    """
    first = weights[0]
    frame = frame_of_step(optimizer, first, source, batch_number)
    origin = Origin(
        frame=frame,
        problem=first.severity.problem,
        what=f"{optimizer}'s step",
        row=frame.rows[-1].label,
        dtype=dtype_of(first.weight),
        limit=LIMITS.get(dtype_of(first.weight)),
        spread=tuple(f"weight {each.name}" for each in weights[1 : MOST_NAMES + 1]),
        spread_count=len(weights) - 1,
    )
    return or_else(origin, _explained, origin, first, saw_gradients)


def _explained(origin: Origin, bad: SteppedWeight, saw_gradients: bool) -> Origin:
    """The origin with the numbers at the first bad element."""
    with own_arithmetic():
        detail = describe(bad.weight)
        index = detail.first_index
        assert index is not None
        numbers = {
            key: float(value[index])
            for key, value in bad.state.items()
            if isinstance(value, Tensor) and value.shape == bad.weight.shape
        }
        gradient = float(bad.gradient[index])
        eps = bad.group.get("eps")
        held = None if eps is None else float(torch.tensor(float(eps), dtype=bad.weight.dtype))
    origin = with_counts(origin, detail)
    moment = next((numbers[key] for key in SECOND_MOMENTS if key in numbers), None)
    rate = float(bad.group.get("lr", math.nan))
    place = f"at {list(index)}: "
    if not math.isfinite(gradient):
        before = "; it was finite when its backward ended" if saw_gradients else ""
        text = f"{place}the gradient was {gradient:.4g} when the step began{before}"
        return replace(origin, operands=text)
    if moment == 0 and held == 0:
        kept = f"eps {eps:g} is 0 in {origin.dtype}" if eps else "eps is 0"
        return replace(
            origin,
            cause="zero divisor",
            operands=f"{place}the step divides by sqrt({moment}) + eps, and {kept}; "
            f"gradient {gradient:.4g}",
            fixes=(Fix("advice", _larger_eps(origin.dtype)),),
        )
    return replace(
        origin,
        cause="overflow",
        operands=f"{place}learning rate {rate:g}, gradient {gradient:.4g}",
        fixes=(Fix("advice", f"a smaller learning rate: it is {rate:g}"),),
    )


def _larger_eps(dtype: str) -> str:
    """An eps that the dtype can hold."""
    if dtype == "float16":
        return "eps=1e-4, or weights in float32 that autocast casts for the forward"
    return "an eps above 0"
