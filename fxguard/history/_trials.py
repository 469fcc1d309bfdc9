"""Second runs of a batch whose loss jumps: the same once more, and that of other batches.

They are made before the backward: the weights are those that the loss was computed with. What was
tried once on a healthy batch, with the numbers of the first run, is tried again when a loss jumps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from fxguard.forgiving import theirs, where_theirs_may_raise
from fxguard.graph.nodes import class_name
from fxguard.graph.wide_form import NotJudged
from fxguard.history._judge import Judge
from fxguard.history._kept_batches import MOST, KeptBatches
from fxguard.history._kept_weights import KeptWeights
from fxguard.history._one_sample import Sample, sample_that_matters
from fxguard.history._watch import USUAL
from fxguard.ranks import agreement
from fxguard.rerun.lineage import Lineage

__all__ = ["Trial", "Trials"]

PAUSE = 8  # steps between two trials
MUCH = 2.0  # times the loss of the last trial: another one is made at once
LATE = 8  # steps from a trial to the event that it tells of
LONGEST = 10.0  # seconds after which no further second run begins
AMONG_RANKS = 1.0  # likewise, where other ranks wait for the backward
CLEARLY = 0.25  # of the jump: a loss that is less above the usual one is one of a healthy batch
CLOSE = 1e-3  # relative: a second run repeats a loss
FORMS = 8  # in which losses came about, for which it is tried once whether a second run does

TOO_LARGE = "a batch takes more than 64 MB"
OTHERS = "the batches before had other shapes"
FEW = "too few batches of this run came before"
SLOW = "second runs of it take too long"
UNLIKE = "a second run of the batch does not repeat its loss"


class Before(NamedTuple):
    """An earlier batch that was run again."""

    step: int
    then: float  # its loss in that step
    now: float  # with the weights of the trial


@dataclass(frozen=True, slots=True)
class Trial:
    """What second runs of a batch have given, with the weights of the first run."""

    step: int
    usual: float  # the median of the losses before
    loss: float  # as the training has computed it
    again: float = math.nan  # the same run once more; NaN if none was made
    before: tuple[Before, ...] = ()  # batches, the last first
    weights: tuple[tuple[int, float], ...] = ()  # likewise of this batch with the weights of steps
    sample: Sample | None = None  # that makes the loss of this one
    why_not: str = ""  # no second run was made, or it tells nothing

    def is_usual(self, loss: float, share: float = 0.5) -> bool:
        """Whether a loss is above what is usual by less than this share of the jump."""
        return loss < self.usual + share * (self.loss - self.usual)

    @property
    def is_machines(self) -> bool:
        """Whether the same run has given another loss, as those before it were."""
        return not self.why_not and self.is_usual(self.again)

    def before_step(self, step: int) -> Before | None:
        """The last batch that was tried of those before a step, and that was usual there.

        The data may have changed some batches before: those that have the loss that they had, and
        it was no usual one, say nothing of the weights. They are passed over, but if all are such.
        """
        tried = [each for each in self.before if each.step < step]
        usual = (each for each in tried if not self._is_as_unusual(each))
        return next(usual, tried[0] if tried else None)

    def changed_at(self, step: int) -> int:
        """The first step whose batch has as unusual a loss as that of the trial, up to a step."""
        known = self.before_step(step)
        unusual = (
            each.step
            for each in self.before
            if known is not None and known.step < each.step < step and self._is_as_unusual(each)
        )
        return min(unusual, default=step)

    def _is_as_unusual(self, batch: Before) -> bool:
        is_same = abs(batch.now - batch.then) < CLEARLY * (self.loss - self.usual)
        return is_same and not self.is_usual(batch.then)

    def shows_data(self, begin: int) -> bool | None:
        """Whether the batch makes the jump of its loss, and no weight, setting or operation.

        Args:
            begin: the step in which something left its band first.

        Returns:
            None if the trial does not show it: the batches before came after that step, were as
            unusual, or the weights have been written since.
        """
        before = self.before_step(begin)
        if before is None or self.why_not or self._is_as_unusual(before):
            return None
        if self.is_usual(before.now, CLEARLY):
            return True
        return False if begin == self.step and not self.is_usual(before.now) else None


class Trials:
    """Keeps what second runs need, and makes them when a loss jumps.

    Args:
        judge: gives what says whether it does: a resumed run replaces it.
        model: gives the model whose earlier weights are tried too; None for no such trial.
    """

    def __init__(self, judge: Callable[[], Judge], model: Callable[[], Module | None]) -> None:
        self._judge, self._model = judge, model
        self._weights = KeptWeights()
        self._kept = KeptBatches()
        self._repeated = set[Hashable]()  # forms of losses that a second run has repeated
        self._not_repeated = set[Hashable]()
        self.last: Trial | None = None  # the last trial
        self._is_early = False  # whether nobody knew what is usual when the last loss came

    def loss_comes(
        self, series: int, root: Tensor, loss: Tensor, scale: Tensor | None, step: int
    ) -> None:
        """Called before a backward.

        Args:
            series: the position of the series of the loss.
            root: the tensor that the backward begins with.
            loss: its number, of one element.
            scale: what that is divided by; None for nothing.
            step: the step that runs.
        """
        judge = self._judge()
        watch = judge.watch_of(series)
        self._is_early = watch is None or watch.known < USUAL - MOST
        if watch is None or self._is_early:
            return
        by = 1.0 if scale is None else float(scale)
        number = float(loss) / by
        may_jump = watch.may_jump(number) or watch.is_above(number)
        jumps = may_jump and not judge.has_event
        if self.last is not None and step < self.last.step + PAUSE:
            jumps &= number > MUCH * self.last.loss
        try:
            lineage = Lineage(root)
        except NotJudged as reason:
            if jumps:
                self.last = Trial(step, watch.usual, number, why_not=str(reason))
            return
        if jumps:
            losses = _Losses(lineage, by)
            self.last = self._tried(Trial(step, watch.usual, number), series, losses)
        elif watch.known >= USUAL and len(self._repeated | self._not_repeated) < FORMS:
            self._repeat_once(lineage, number, by)
        self._kept.keep(series, step, number, lineage.data)
        if (model := self._model()) is not None:
            self._weights.keep(step, model)

    def of_step(self, step: int) -> Trial | None:
        """The last trial, if it tells of an event that a step shows."""
        last = self.last
        if last is not None and step - LATE <= last.step <= step:
            return last
        return Trial(step, math.nan, math.nan, why_not=FEW) if self._is_early else None

    def _repeat_once(self, lineage: Lineage, number: float, by: float) -> None:
        """See whether a second run repeats a healthy loss."""
        form = lineage.form
        if form not in self._repeated and form not in self._not_repeated:
            repeats = False
            with where_theirs_may_raise():  # an operation that does not run twice, no memory
                repeats = _are_close(_Losses(lineage, by).of(), number)
            (self._repeated if repeats else self._not_repeated).add(form)

    def _tried(self, trial: Trial, series: int, losses: _Losses) -> Trial:
        try:
            again = losses.of()
            trial = replace(trial, again=again)
            if not _are_close(again, trial.loss):
                is_known = losses.lineage.form in self._repeated
                is_machines = is_known and trial.is_usual(again) and losses.of() == again
                return trial if is_machines else replace(trial, why_not=UNLIKE)
            data = losses.lineage.data
            before = [
                Before(kept.step, kept.loss, losses.of(kept.data))
                for kept in self._kept.before(series, data)
                if losses.has_time
            ]
            trial = replace(trial, before=tuple(before), why_not=self._why_none(series, before))
            trial = replace(trial, weights=tuple(self._with_weights(trial, losses)))
            if before and trial.is_usual(before[0].now):
                sample = sample_that_matters(losses.of, data, again, before[0].now)
                trial = replace(trial, sample=sample)
        except NotJudged as reason:
            return trial if trial.before else replace(trial, why_not=str(reason))
        except theirs() as error:  # an operation that does not run twice, no memory
            return trial if trial.before else replace(trial, why_not=_first_line(error))
        return trial

    def _with_weights(self, trial: Trial, losses: _Losses) -> Iterator[tuple[int, float]]:
        """The loss with the weights of earlier steps, back to the first with which it is usual."""
        for step, weights in self._weights.before(trial.step):
            if not losses.has_time:
                break
            loss = losses.of(weights=weights)
            yield step, loss
            if trial.is_usual(loss):
                break

    def _why_none(self, series: int, before: Sequence[object]) -> str:
        if before:
            return ""
        if self._kept.is_too_large:
            return TOO_LARGE
        return OTHERS if self._kept.has(series) else FEW


class _Losses:
    """Makes second runs of one batch, for some time."""

    def __init__(self, lineage: Lineage, scale: float) -> None:
        self.lineage = lineage
        self._scale = scale
        longest = LONGEST if agreement.rank_and_count()[1] == 1 else AMONG_RANKS
        self._end = time.monotonic() + longest

    @property
    def has_time(self) -> bool:
        """Whether another one may begin."""
        return time.monotonic() < self._end

    def of(
        self,
        data: Sequence[Tensor] | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> float:
        """The loss of other data or with other weights, or of the same."""
        if not self.has_time:
            raise NotJudged(SLOW)
        return float(self.lineage.again(data, weights)) / self._scale


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE * CLOSE)


def _first_line(error: Exception) -> str:
    return f"a second run raised {class_name(type(error))}: {str(error).partition(chr(10))[0][:80]}"
