"""What an optimizer's step made of a weight and, if that is bad, why and what to do about it.

It is read after the step, from the gradients and moments that the step used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.frames import row_of
from fxguard.batch.late_writes import LateWrite
from fxguard.findings import Fix, Origin
from fxguard.forgiving import or_else
from fxguard.formats import LIMITS
from fxguard.measure.at_hand import dtype_of, own_arithmetic
from fxguard.measure.details import Detail, describe
from fxguard.records import Frame, Severity, Source
from fxguard.source.lines import source_at
from fxguard.steps.first_bad import FirstBad
from fxguard.steps.step_rules import Excused, StepCase, finding_of, told_writes
from fxguard.verdict.explain import with_counts

__all__ = ["Spoilt", "SteppedWeight", "frame_of_step", "origin_of_step", "origin_of_write"]

MOST_NAMES = 3  # of weights


@dataclass(frozen=True, slots=True)
class SteppedWeight:
    """A weight after an optimizer's step; it was finite before."""

    name: str
    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Any]  # the optimizer's state for this weight
    group: Mapping[str, Any]  # its settings
    severity: Severity = Severity.FINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt:
    """A step that made weights bad, and what is known of it."""

    optimizer: str  # name of its class
    weights: Sequence[SteppedWeight]  # at least one; the first one is examined closely
    is_own: bool = False  # whether its step is not one of torch's
    inside: FirstBad | None = None  # of an own step, which ran again
    why_not_inside: str = ""  # why it did not
    saw_gradients: bool = False  # whether each backward was checked at its end
    backwards: int = 1  # since the last step
    excused: Excused | None = None  # the last backward whose bad gradients the scale excuses
    scaled_by: float = 1.0  # a GradScaler's scale that the gradients still have
    changed_by: tuple[LateWrite, ...] = ()  # what wrote the first gradient since its backward
    schedule: str = ""  # what set the learning rate
    reason: str = ""  # the part of that which is not finite
    spoilt_in: int | None = None  # the batch after which an earlier step wrote bad gradients
    brought_in: int | None = None  # the batch whose backward brought the bad gradient


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


def origin_of_step(spoilt: Spoilt, source: Source | None, batch_number: int) -> Origin:
    """Describe for the user what a step has done.

    Args:
        spoilt: the step.
        source: the line that made the step.
        batch_number: number of the last batch.
    """
    first, more = spoilt.weights[0], spoilt.weights[1:]
    frame = frame_of_step(spoilt.optimizer, first, source, batch_number)
    origin = Origin(
        frame=frame,
        problem=first.severity.problem,
        what=f"{spoilt.optimizer}'s step",
        row=frame.rows[-1].label,
        dtype=dtype_of(first.weight),
        limit=LIMITS.get(dtype_of(first.weight)),
        spread=tuple(f"weight {each.name}" for each in more[:MOST_NAMES]),
        spread_count=len(more),
    )
    return or_else(origin, _explained, origin, spoilt)


def _explained(origin: Origin, spoilt: Spoilt) -> Origin:
    """The origin with the numbers at the first bad element."""
    bad = spoilt.weights[0]
    with own_arithmetic():
        detail = describe(bad.weight)
        index = _first_of_problem(bad.weight, detail)
        states = {
            key: float(value[index])
            for key, value in bad.state.items()
            if isinstance(value, Tensor) and value.shape == bad.weight.shape
        }
        gradient = float(bad.gradient.to_dense()[index])
        weight = float(bad.weight[index])
        settings = settings_of(bad.group)
        eps = settings.get("eps")
        held = None if eps is None else float(torch.tensor(eps, dtype=bad.weight.dtype))
    found = finding_of(
        StepCase(
            optimizer=spoilt.optimizer,
            dtype=origin.dtype,
            index=index,
            weight=weight,
            gradient=gradient,
            states=states,
            settings=settings,
            held_eps=held,
            is_own=spoilt.is_own,
            inside=spoilt.inside,
            why_not_inside=spoilt.why_not_inside,
            saw_gradients=spoilt.saw_gradients,
            backwards=spoilt.backwards,
            excused=spoilt.excused,
            scaled_by=spoilt.scaled_by,
            changed_by=spoilt.changed_by,
            schedule=spoilt.schedule,
            reason=spoilt.reason,
            spoilt_in=spoilt.spoilt_in,
            brought_in=spoilt.brought_in,
        )
    )
    frame = origin.frame
    if found.place is not None:
        frame = replace(frame, source=source_at(found.place))
    return replace(
        with_counts(origin, detail),
        frame=frame,
        cause=found.cause,
        cause_in_words=found.words,
        operands=found.text,
        fixes=found.fixes,
    )


def _first_of_problem(weight: Tensor, detail: Detail) -> tuple[int, ...]:
    """The first NaN of a weight; its first infinity if it holds none."""
    assert detail.first_index is not None
    if not detail.nan_count:
        return detail.first_index
    return tuple(map(int, torch.isnan(weight.detach()).nonzero()[0]))


def settings_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the settings of an optimizer's group: ``{"lr": 0.1, "betas[0]": 0.9}``."""
    found: dict[str, float] = {}
    for key, value in group.items():
        several = isinstance(value, (tuple, list)) and key != "params"
        for index, each in enumerate(value if several else (value,)):
            is_number = isinstance(each, (int, float)) and not isinstance(each, bool)
            if is_number or (isinstance(each, Tensor) and each.numel() == 1):
                found[f"{key}[{index}]" if several else key] = float(each)
    return found


def origin_of_write(
    optimizer: str,
    weights: Sequence[SteppedWeight],
    writes: Sequence[LateWrite],
    source: Source | None,
    batch_number: int,
) -> Origin:
    """Describe weights that were bad when a step began, and not when the last step had ended.

    Args:
        optimizer: name of the optimizer's class.
        weights: at least one; the first one is examined closely.
        writes: what wrote the first one since the last backward, as far as it was seen.
        source: the line that makes the step.
        batch_number: number of the last batch.
    """
    first, more = weights[0], weights[1:]
    text, what = "it was finite when the last step had ended, and not when this one began", ""
    fix = "look at what writes weights between two steps, under no_grad"
    if writes:
        source = source_at(writes[0].place)
        text += f"; {told_writes(writes)} wrote it since the backward"
        fix = "look at what this line makes of a weight, or of a norm, that is 0 or large"
        what = writes[0].kind if len(writes) == 1 else ""
    origin = Origin(
        frame=frame_of_step(optimizer, first, source, batch_number),
        problem=first.severity.problem,
        what=f"{what or 'something'} before {optimizer}'s step",
        row="output",
        dtype=dtype_of(first.weight),
        limit=LIMITS.get(dtype_of(first.weight)),
        spread=tuple(f"weight {each.name}" for each in more[:MOST_NAMES]),
        spread_count=len(more),
        operands=text,
        fixes=(Fix("advice", fix),),
    )
    with own_arithmetic():
        detail = describe(first.weight)
    return with_counts(origin, detail)
