"""Caches verdicts of healthy batches that contain infinities, so that each kind is judged once.

Masks of -inf and T5's ``log(0)`` are there in every batch. The verdict depends only on which values
are bad, and on a few properties of tensors that no graph measures. If all of these match an earlier
batch that was judged healthy, the new batch is healthy too, and the analysis is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import Key
from fxguard.formats import limit_of
from fxguard.plan.plan import Plan

__all__ = ["Answer", "Precedents", "Question"]

CASES = 256  # more of them are judged each time

Answer = float | bool | None


class Question(NamedTuple):
    """A question about a tensor that no graph measures."""

    key: Key  # which one
    about: Literal["is mask", "extreme"]


class Precedents:
    """What the batches of one model looked like that were judged healthy."""

    def __init__(self) -> None:
        self._cases: dict[Hashable, Mapping[Question, Answer]] = {}
        # By id of the plan, and whether only what left the graph was measured.
        self._limits: dict[tuple[int, bool], tuple[Plan, Tensor]] = {}

    def match(self, case: Hashable | None, ask: Callable[[Question], Answer]) -> bool:
        """Whether a batch is like one that was judged healthy before.

        Args:
            case: of the batch, see :meth:`case_of`.
            ask: answers a question about it.
        """
        questions = self._cases.get(case)
        return questions is not None and all(
            _same(ask(question), answer) for question, answer in questions.items()
        )

    def add(self, case: Hashable | None, answers: Mapping[Question, Answer]) -> None:
        """Note that a batch of this kind was healthy, and what its judgment had asked."""
        if case is not None and len(self._cases) < CASES:
            self._cases[case] = dict(answers)

    def case_of(self, batch: Batch) -> Hashable | None:
        """All that a verdict depends on, except for the answers; None where that is too much.

        Args:
            batch: one whose numbers were read.
        """
        identities = tuple(event.identity() for event in batch.events)
        if None in identities:
            return None
        return identities, tuple(bytes(self._pattern(run).tolist()) for run in batch.runs)

    def _pattern(self, run: GraphRun) -> Tensor:
        """For each number whether it is NaN, inf, its dtype's limit, or none, shape [count]."""
        plan = run.plan
        if run.postponed is None:
            highs, values = run.statistics[:, 1], [v for v in plan.values if v.slot is not None]
        else:
            highs = run.postponed.leaving[:, 1]
            values = [plan.values[index] for index in run.postponed.values]
        key = id(plan), run.postponed is not None
        if key not in self._limits:  # the plan is kept: nobody else gets its id
            limits = [limit_of(value.dtype) for value in values]
            self._limits[key] = plan, torch.tensor(limits, dtype=highs.dtype)
        limit = self._limits[key][1]
        pattern = torch.isnan(highs).to(torch.uint8)
        for weight, holds in ((2, torch.isinf(highs)), (4, highs == limit), (8, highs < 0)):
            pattern += weight * holds
        return pattern


def _same(one: Answer, other: Answer) -> bool:
    return one == other or (one != one and other != other)  # NaN is as bad as NaN
