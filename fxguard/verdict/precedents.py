"""Caches verdicts of healthy batches that contain infinities, so that each kind is judged once.

Masks of -inf and T5's ``log(0)`` are in every batch. The verdict depends only on which values
are bad, and on a few properties of tensors that no graph measures. If all of these match an earlier
batch that was judged healthy, the new batch is healthy too, and the analysis is skipped. Elements
next to intended infinities may be larger than before, as long as that cannot make anything
overflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import Key
from fxguard.formats import LIMITS
from fxguard.plan.plan import Plan
from fxguard.records import Range

__all__ = ["Answer", "Conditions", "Precedents", "Question"]

CASES = 256  # further kinds are judged each time

Answer = float | Range | None
Pattern = tuple[tuple[int, float | None], ...]


class Question(NamedTuple):
    """A question about a tensor that no graph measures."""

    key: Key  # key of the tensor
    # "mask": the range of its finite elements if it is a mask, else None. "extreme": its magnitude
    # if that is NaN, inf or the dtype's limit. "range": its range.
    about: Literal["mask", "extreme", "range"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions for a batch to be healthy, besides the pattern of its numbers."""

    answers: Mapping[Question, Answer]  # for a range: the range that must contain it
    # Event, or -1 for operations between graphs, to the rows of its numbers that must be within
    # limits, and the limits: minimum and maximum, shape [count, 2].
    limits: Mapping[int, tuple[Tensor, Tensor]]


class Precedents:
    """The kinds of batches of one model that were judged healthy."""

    def __init__(self) -> None:
        self._cases: dict[Hashable, Conditions] = {}
        # By id of the plan, and whether only the graph's outputs were measured.
        self._limits: dict[tuple[int, bool], tuple[Plan, Tensor]] = {}

    def match(self, case: Hashable | None, batch: Batch, ask: Callable[[Question], Answer]) -> bool:
        """Whether a batch matches one that was judged healthy before.

        Args:
            case: the case of the batch, see :meth:`case_of`.
            batch: the batch.
            ask: answers a question about it.
        """
        known = self._cases.get(case)
        return (
            known is not None
            and all(_within(batch.numbers_of(event), *rows) for event, rows in known.limits.items())
            and all(_fits(ask(question), answer) for question, answer in known.answers.items())
        )

    def add(self, case: Hashable | None, conditions: Conditions | None) -> None:
        """Note that a batch of this kind was healthy, with the conditions, if there are any."""
        is_kept = len(self._cases) < CASES or case in self._cases
        if case is not None and conditions is not None and is_kept:
            self._cases[case] = conditions

    def case_of(self, batch: Batch) -> Hashable | None:
        """Everything that a verdict depends on, except the answers; None if that is too much.

        Args:
            batch: a batch whose numbers were read.
        """
        identities = tuple(event.identity() for event in batch.events)
        if None in identities:
            return None
        return identities, tuple(map(self._of_run, batch.runs)), self._of_between(batch)

    def _of_run(self, run: GraphRun) -> Pattern:
        """The unusual numbers of one run of a graph."""
        put_off = run.postponed
        key = id(run.plan), put_off is not None
        if key not in self._limits:  # the plan is kept alive, so that its id stays unique
            values = run.plan.values
            if put_off is None:
                measured = [value for value in values if value.slot is not None]
            else:
                measured = [values[index] for index in put_off.values]
            self._limits[key] = run.plan, _limits_of(tuple(value.dtype for value in measured))
        return _pattern(run.numbers, self._limits[key][1])

    def _of_between(self, batch: Batch) -> Hashable:
        """What a verdict depends on among the values measured between graphs."""
        if batch.between is None:
            return None
        values = tuple((value.role, value.dtype, value.note) for value in batch.values)
        pattern = _pattern(batch.between, _limits_of(tuple(v.dtype for v in batch.values)))
        signs = tuple(
            (row, detail.nan_count > 0, detail.posinf_count > 0, detail.neginf_count > 0)
            for row, detail in batch.details.items()
        )
        ends = None if batch.ends is None else tuple(batch.ends)
        return values, pattern, signs, ends


@functools.lru_cache(maxsize=CASES)
def _limits_of(dtypes: tuple[str, ...]) -> Tensor:
    return torch.tensor([LIMITS.get(dtype, math.inf) for dtype in dtypes], dtype=torch.float64)


def _pattern(numbers: Tensor, limits: Tensor) -> Pattern:
    """The numbers that are NaN, inf, their dtype's limit, or missing, by row; NaN as None."""
    highs = numbers[:, 1]
    is_usual = (highs >= 0) & (highs < limits.to(highs.dtype))
    rows = torch.nonzero(~is_usual).view(-1)
    found = zip(rows.tolist(), highs[rows].tolist(), strict=True)
    return tuple((row, None if high != high else max(high, -1.0)) for row, high in found)


def _within(numbers: Tensor | None, rows: Tensor, limits: Tensor) -> bool:
    if numbers is None:  # they were postponed: the pattern of the outputs has to suffice
        return True
    found = numbers[rows]
    return bool(((limits[:, 0] <= found[:, 0]) & (found[:, 1] <= limits[:, 1])).all())


def _fits(found: Answer, expected: Answer) -> bool:
    if isinstance(found, Range) and isinstance(expected, Range):
        return expected.abs_min <= found.abs_min and found.abs_max <= expected.abs_max
    return found == expected or (found != found and expected != expected)  # NaN equals NaN here
