"""Looks for quiet faults in the training of one guarded model, while its steps are watched."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.late_writes import LateWrites
from fxguard.batch.loss import Loss
from fxguard.forgiving import theirs, where_theirs_may_raise
from fxguard.guard.listeners import Listener, Recorded
from fxguard.install.backwards import hear_of_backwards
from fxguard.quiet._clipped import ClippedBeforeUnscaled
from fxguard.quiet._dropout import DropoutInEvaluation
from fxguard.quiet._held import Held
from fxguard.quiet._losses import LossFaults
from fxguard.quiet._lost import LostUpdates
from fxguard.quiet._modes import EvaluationInTraining
from fxguard.quiet._moves import NeverMoves
from fxguard.quiet._recheck import Recheck
from fxguard.quiet._replicas import ReplicasDiffer
from fxguard.quiet._stale import StaleGradients
from fxguard.quiet._training import Rule, Step, Training
from fxguard.report import terminal
from fxguard.report.quiet_fault import QuietFault
from fxguard.report.report import Report
from fxguard.source.lines import Place, calling_line
from fxguard.steps.step_hooks import StepHooks
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin

__all__ = ["QuietFaults"]

RULES = (
    LossFaults,
    ClippedBeforeUnscaled,
    StaleGradients,
    NeverMoves,
    LostUpdates,
    ReplicasDiffer,
)


_all: weakref.WeakSet[QuietFaults] = weakref.WeakSet()  # whose models have weights


class QuietFaults(Listener):
    """Hears of losses, gradients and steps, and tells rules of them.

    Args:
        recorder: the batches of the model.

    Attributes:
        tells: whether each fault is printed when it is found.
    """

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder)
        self.tells = True
        self._training = Training(
            self._model, self._name, self._writes, self._is_scaled, _weights_of_all, self._tell
        )
        self._dropout = DropoutInEvaluation(self._training)
        self._mode = EvaluationInTraining(self._training)
        self._recheck: Recheck | None = None
        rules: list[Rule] = [self._mode, *(rule(self._training) for rule in RULES)]
        if self.options.recheck is not None:
            self._recheck = Recheck(self._training, self.options.recheck)
            rules.append(self._recheck)
        self._hearers = {  # what each event calls, of the rules that hear of it
            event: [getattr(x, event) for x in rules if getattr(type(x), event) is not method]
            for event, method in vars(Rule).items()
            if not event.startswith("_")
        }
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[int, Held]]
        self._held = weakref.WeakKeyDictionary()
        self._watching: tuple[StepHooks, Callable[[], None]] | None = None
        self._is_part = False  # of another guarded model, which was called by itself
        self._others = 0  # when that was last asked
        self._step: Step | None = None

    @property
    def quiet_faults(self) -> Sequence[QuietFault]:
        """What was found so far."""
        return self._training.faults

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report, with what is wrong with the training besides."""
        return self.reports_rest(report)

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """Likewise."""
        return self.reports_rest(report)

    def reports_rest(self, report: Report) -> Report:
        """Likewise."""
        found = tuple(self.quiet_faults)
        return replace(report, quiet_faults=found) if found else report

    def called(self, runs: Sequence[GraphRun]) -> None:
        """Look at dropout, where the model is in evaluation mode."""
        model = self._model()
        if model is None:
            return
        if model.training:
            if not torch.is_grad_enabled():
                with where_theirs_may_raise():  # modules of others
                    self._dropout.copy_called(model, _models_of_all())
            return
        with where_theirs_may_raise():  # modules of others, and their mode
            self._dropout.called(model, runs)
            self._mode.called()

    def loss_came(self, loss: Loss) -> None:
        """Let rules look at a loss, before its backward."""
        place = calling_line()
        self._tell_all("loss_comes", loss, place)

    loss_heard = loss_came

    def _tell_all(self, event: str, *given: Any) -> None:
        for hear in self._hearers[event]:
            try:
                hear(*given)
            except theirs():  # tensors and optimizers of others may object to any question
                continue

    def _backward_comes(
        self, roots: list[Tensor], place: Place | None
    ) -> contextlib.AbstractContextManager[None] | None:
        self._tell_all("backward_comes", place)
        return None if self._recheck is None else self._recheck.backward()

    def begins(self, batch: Batch) -> None:
        """Run the operations of a batch twice, if that was asked for."""
        if self._recheck is not None:
            with where_theirs_may_raise():  # tensors of classes that answer in a way of their own
                self._recheck.begins(batch)

    def coverage(self) -> str:
        """How many operations ran twice."""
        return "" if self._recheck is None else self._recheck.coverage

    def gradients_came(self) -> None:
        """Let rules know that the backward has ended."""
        self._tell_all("gradients_came")

    def watches_steps(self) -> None:
        """Hear of optimizers and backwards, if the model has weights."""
        model = self._model()
        if model is not None and next(model.parameters(), None) is not None:
            _all.add(self)
            if self._recheck is not None:
                self._recheck.watches_steps()
            hooks = StepHooks(self._before, self._after)
            self._watching = hooks, hear_of_backwards(self._backward_comes)

    def leaves_steps(self) -> None:
        """Let rules judge what can be judged at the end only."""
        if self._watching is not None:
            hooks, end = self._watching
            self._watching = None
            _all.discard(self)
            hooks.close()
            end()
            self._tell_all("ends")

    closes = leaves_steps

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with where_theirs_may_raise():  # optimizers of others, and their groups
            self._step = self._begun(optimizer)
        if self._step is not None:
            self._tell_all("before", self._step)

    def _begun(self, optimizer: Optimizer) -> Step | None:
        weights = self._weights_of(optimizer)
        if weights and self._others != len(_all):
            self._is_part, self._others = self._is_in_another(), len(_all)
        if self._is_part:
            return None
        if not weights:
            self._tell_all("of_others", optimizer)
            return None
        self._training.steps += 1
        is_learning = any(_is_above_zero(group.get("lr")) for group in optimizer.param_groups)
        return Step(optimizer, weights, self._training.steps, is_learning)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step, self._step = self._step, None
        if step is None or step.optimizer is not optimizer:
            return
        self._tell_all("after", step)

    def _is_in_another(self) -> bool:
        own = self._model()
        models = [model for each in tuple(_all) if (model := each._model()) is not None]
        return any(own is not model and any(x is own for x in model.modules()) for model in models)

    def _weights_of(self, optimizer: Optimizer) -> Held:
        """The weights of the model that an optimizer holds, by name."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._held.get(optimizer)
        if known is None or known[0] != count:
            model = self._model()
            names = {} if model is None else {id(x): name for name, x in model.named_parameters()}
            held = [weight for group in optimizer.param_groups for weight in group["params"]]
            found = Held({names[id(x)]: x for x in held if id(x) in names})
            known = self._held[optimizer] = count, found
        return known[1]

    def _model(self) -> Module | None:
        recorder = self._recorder()
        return None if recorder is None else recorder.model

    def _name(self) -> str:
        recorder = self._recorder()
        return "" if recorder is None else recorder.held_as

    def _writes(self) -> LateWrites | None:
        recorder = self._recorder()
        writes = None if recorder is None else recorder.steps.writes
        return None if writes is None else writes()

    def _is_scaled(self) -> bool:
        recorder = self._recorder()
        scalers = () if recorder is None else recorder.steps.scalers or ()
        return any(x.is_enabled() for x in scalers)

    def _tell(self, fault: QuietFault) -> None:
        if self.tells:
            terminal.write(f"fxguard: note: {fault.line}", sys.stderr)


def _is_above_zero(rate: object) -> bool:
    """Whether a learning rate moves anything; one on another device counts, to wait for nothing."""
    return not isinstance(rate, (int, float)) or rate > 0


def _models_of_all() -> list[tuple[Module, int]]:
    """All models that are watched, with the steps of each."""
    pairs = ((each._model(), each._training.steps) for each in tuple(_all))
    return [(model, steps) for model, steps in pairs if model is not None]


def _weights_of_all() -> set[int]:
    """The identities of the weights of all models that are watched."""
    models = [model for each in tuple(_all) if (model := each._model()) is not None]
    return {id(weight) for model in models for weight in model.parameters()}
