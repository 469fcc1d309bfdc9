"""The outputs of two models: how far apart they are, as computed and in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxguard.comparison._moves import Moves
from fxguard.comparison._programs import IN_TWO_DTYPES, Program
from fxguard.comparison._rounding import (
    apart,
    are_one_program,
    distance_of,
    error_of,
    rms_of,
    unit_of,
)
from fxguard.comparison._runs import ModelRun
from fxguard.comparison.elements import Compared
from fxguard.graph.wide_form import is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.trace.batch_diff import COARSER, TOLERANCES

__all__ = ["OutputPair", "Tolerance", "compare_outputs", "paired_outputs"]

TIMES = 4  # the tolerance of ranges: single elements are further apart than ranges
UNITS = 4  # the tolerance of an output, in units of roundoff of each model
# What numbers in two programs may have been rounded by, in units of roundoff of the finer dtype.
OF_NUMBERS = 8


@dataclass(frozen=True, slots=True)
class OutputPair:
    """One output of both models."""

    title: str
    a: Tensor
    b: Tensor
    wide_a: Tensor | None = None  # what A's program makes of A's inputs and weights in float64
    wide_b: Tensor | None = None  # what B's program makes of them
    inexact: str = ""  # why float64 cannot tell whether the two programs are one
    same_within: tuple[float, float] = (0.0, 0.0)  # roundoff of the finer dtype, and of the coarser
    moved: Tensor | None = None  # how far it moves with roundings of weights that one side has

    @property
    def is_judged(self) -> bool:
        """Whether both programs made it in float64."""
        return self.wide_a is not None and self.wide_b is not None and not self.inexact

    @property
    def draws(self) -> bool:
        """Whether the two models may have drawn other random numbers."""
        return IN_TWO_DTYPES in self.inexact

    @property
    def moved_by(self) -> float:
        """How far it moves with those roundings, root mean square, relative to its size."""
        if self.moved is None or self.wide_a is None or not is_float(self.wide_a):
            return 0.0
        size = rms_of(self.wide_a)
        return rms_of(self.moved) / size if size else 0.0

    @property
    def is_one_program(self) -> bool:
        """Whether both programs make the same of the same inputs and weights."""
        return self._is_within(OF_NUMBERS * self.same_within[0])

    @property
    def is_within_roundings(self) -> bool:
        """Whether roundings of the coarser dtype may be why the programs differ."""
        return self._is_within(UNITS * self.same_within[1])

    def _is_within(self, unit: float) -> bool:
        if self.wide_a is None or self.wide_b is None:
            return False
        moved: Tensor | float = 0.0
        if self.moved is not None and is_float(self.wide_a):
            moved = self.moved + rms_of(self.moved)
        return are_one_program(self.wide_a, self.wide_b, unit, moved)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart an output may be, root mean square, relative to that of A.

    By default each model may be off by 4 units of roundoff, and by what outputs move when each
    weight that only one model has is off by as many. These add up as independent errors do.
    """

    units: tuple[float, float]  # of roundoff, of A and B
    given: float | None = None  # by the user, for every output

    def of(self, pair: OutputPair) -> float:
        if self.given is not None:
            return self.given
        return UNITS * math.hypot(*self.units, pair.moved_by)

    def is_exceeded(self, pair: OutputPair) -> bool:
        return not distance_of(pair.a, pair.b) <= self.of(pair)


def paired_outputs(
    a: ModelRun, b: ModelRun, programs: tuple[Program, Program] | None, why: str
) -> list[OutputPair]:
    """The outputs of both models: by name if all names are the same, else by order.

    Args:
        a: a model that has run.
        b: likewise.
        programs: what both make in float64; None if they cannot run again.
        why: why they cannot.
    """
    by_name = dict(zip(b.output_names, b.outputs, strict=True))
    others = list(b.outputs)
    if len(by_name) == len(b.outputs) and by_name.keys() == set(a.output_names):
        others = [by_name[name] for name in a.output_names]
    units = unit_of(*a.outputs), unit_of(*b.outputs)
    found = []
    for number, (one, other) in enumerate(zip(a.outputs, others, strict=False)):
        wide_a = wide_b = None
        inexact = why
        if programs is not None:
            wide_a, wide_b = programs[0].of(one), programs[1].of(other)
            inexact = "; ".join(dict.fromkeys((*programs[0].inexact, *programs[1].inexact)))
            if wide_a is None or wide_b is None:
                inexact = "no captured graph returned it"
        pair = OutputPair(
            f"output {number}", one, other, wide_a, wide_b, inexact, (min(units), max(units))
        )
        found.append(pair)
    return found


def with_moves(pairs: Sequence[OutputPair], of_a: Moves, of_b: Moves) -> list[OutputPair]:
    """The same outputs, with how far each moves with roundings of weights that one side has."""
    found = []
    for pair in pairs:
        moves = [of_a.outputs.get(id(pair.a)), of_b.outputs.get(id(pair.b))]
        known = [x for x in moves if x is not None]
        same = all(x.shape == known[0].shape for x in known)
        moved = functools.reduce(torch.maximum, known) if known and same else None
        found.append(replace(pair, moved=moved))
    return found


def compare_outputs(
    a: ModelRun,
    b: ModelRun,
    pairs: Sequence[OutputPair],
    *,
    blamed: bool,
    said: dict[int, str],
    all_compared: bool,
    tolerance: float | None,
    output_tolerance: Tolerance,
    reference: Program | None,
) -> Iterator[Compared]:
    """How far apart the outputs are, and whether that is significant.

    The programs of both models run in float64, with A's inputs and weights. If they return other
    values there, an output is wired otherwise. Roundings add up on the way, so an output as it was
    computed differs by more than one operation does, and no operation is to blame for that.

    If float64 cannot tell, an operation that was not compared may be to blame, and outputs may be
    four times as far apart as ranges, relative to the largest magnitude.

    Args:
        a: a model that has run.
        b: likewise.
        pairs: the outputs.
        blamed: whether an operation is to blame already.
        said: where both sides have an output from, by number, if the programs differ there.
        all_compared: whether every operation was compared.
        tolerance: how far apart outputs may be that float64 did not judge; None for the error that
            the dtypes explain.
        output_tolerance: how far apart each output may be.
        reference: the side that has more digits, in float64 with its own weights.
    """
    if a.outputs and b.outputs and len(a.outputs) != len(b.outputs):  # neither has raised
        reason = f"A returned {len(a.outputs)} tensors, B {len(b.outputs)}"
        yield Compared("outputs", "output", reason=reason)
    is_a_finer = unit_of(*a.outputs) <= unit_of(*b.outputs)
    for number, pair in enumerate(pairs):
        one, other = pair.a, pair.b
        if one.shape != other.shape:
            reason = f"shapes differ: {list(one.shape)} in A, {list(other.shape)} in B"
            yield Compared(pair.title, "output", reason=reason)
            continue
        distance, allowed_apart = distance_of(one, other), output_tolerance.of(pair)
        judged, accepted, reason = True, False, ""
        total = apart(one, other) if is_float(one) and is_float(other) else None
        if pair.is_judged:
            if not blamed:
                reason = said.get(number, "")
        elif distance > allowed_apart:
            dtypes = dtype_of(one), dtype_of(other)
            allowed = TIMES * max(TOLERANCES.get(dtype, COARSER) for dtype in dtypes)
            allowed = allowed if tolerance is None else tolerance
            relative = distance if total is None else total.relative
            if not all_compared and not relative <= allowed and not pair.draws:
                reason = (
                    f"more than {allowed:.2g} of the largest magnitude apart; not every operation "
                    "was compared"
                )
            accepted = tolerance is not None and relative <= tolerance
            followed = pair.wide_a is not None and pair.wide_b is not None
            judged = bool(reason) or accepted or (all_compared and followed and not pair.draws)
        high = None if reference is None else reference.of(one if is_a_finer else other)
        errors = None
        if high is not None and is_float(one) and is_float(other) and number not in said:
            errors = error_of(one, high), error_of(other, high)
        yield Compared(
            pair.title,
            "output",
            dtypes=(dtype_of(one), dtype_of(other)),
            total=total,
            errors=errors,
            distance=distance,
            tolerance=None if accepted else allowed_apart if is_float(one) else 0.0,
            is_judged=judged,
            reason=reason,
        )
