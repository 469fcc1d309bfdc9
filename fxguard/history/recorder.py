"""Keeps the history of one guarded model: a row of numbers for each step of its training."""

from __future__ import annotations

import atexit
import inspect
import os.path
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.batch.batch import Batch
from fxguard.batch.loss import Loss
from fxguard.graph.nodes import class_name
from fxguard.guard.listeners import Listener, Recorded
from fxguard.history._buffers import Buffers
from fxguard.history._data import behind, note_data, note_inputs
from fxguard.history._judge import Judge
from fxguard.history._losses import Losses
from fxguard.history._open_step import OpenStep
from fxguard.history._operations import Operations, named_line
from fxguard.history._optimizers import Optimizers
from fxguard.history._run import Run
from fxguard.history._series import Series
from fxguard.history._stages import Stage
from fxguard.history._trials import Trials
from fxguard.history._writer import need_pyarrow
from fxguard.install.backwards import hear_of_backwards
from fxguard.measure.func_levels import levels_left
from fxguard.ranks import agreement
from fxguard.report.errors import HistoryEvent
from fxguard.report.event import Event
from fxguard.source.lines import Place
from fxguard.verdict.report_of import Finished

__all__ = ["Histories"]

_open: weakref.WeakSet[Histories] = weakref.WeakSet()  # whose files are to be ended

WITHOUT = 16  # calls with gradients and without an optimizer's step: from then on each is a step
IN_ONE = 16  # steps of optimizers that one row may hold at the end


class Histories(Listener):
    """Notes what happens in each step, and ends the step.

    A step ends with the steps of optimizers, when the model is called again. Calls without
    gradients, such as an evaluation, are no part of one, nor are those of a model that was trained
    and is frozen.

    Args:
        recorder: the batches of the model.
    """

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder)
        need_pyarrow()
        self._stage = Stage(self.options.history or "", self._end_step)
        self._rank = (0, 1)  # and how many ranks there are
        self._series: list[Series] = []
        self._step = OpenStep(self._register)
        self._operations = Operations(self._step)
        self._losses = Losses()
        self._trials = Trials(self._judge, self._model_of_weights)
        self._optimizers = Optimizers(self._step, self._model_that_runs, self._stepped)
        self._buffers: Buffers | None = None  # None before the first call
        self._arguments: list[str] | None = None  # names of the model's positional ones
        self._calls = 0  # with gradients since the last step
        self._steps = 0  # of optimizers, since the row began
        self._has_optimizer: bool | None = None  # None while that is not known
        self._counts = False  # whether the batch that runs is one of a training
        self._events: list[Event] = []  # all that were told
        self._begun = time.perf_counter()
        self._end = hear_of_backwards(self._backward_comes)
        _open.add(self)
        weakref.finalize(recorder, self.closes).atexit = False  # with its model

    def begins(self, batch: Batch) -> None:
        """End the step before.

        Raises:
            HistoryEvent: with ``stop_at_event``, if a step has shown one.
        """
        with levels_left():  # no level of torch.func reaches into what is kept
            self._begins()
        if self.options.stop_at_event and self._events:
            raise HistoryEvent(self._events[0])

    def _begins(self) -> None:
        if self._has_optimizer is None and self._calls >= WITHOUT:
            self._has_optimizer, self._buffers = False, None
        self._end_step()
        model = self._model()
        is_apart = self._has_optimizer and _is_frozen(model)
        self._counts = torch.is_grad_enabled() and not is_apart
        if not self._stage.has_run:
            self._rank = agreement.rank_and_count()  # a script may destroy the group before its end
        if not self._counts:
            return
        if not self._calls and model is not None:
            if self._buffers is None:
                is_stepped = self._has_optimizer is not False
                self._buffers = Buffers(self._step, model, is_stepped=is_stepped)
            self._buffers.note()
        self._calls += 1
        self._stage.called(model)

    def read(self, finished: Finished, error: Exception | None) -> Finished:
        """Note what the model was given, and what its operations have made."""
        if self._counts:
            if (call := finished.batch.call) is not None:
                note_inputs(self._step, self._names_of_arguments(), call.args, call.kwargs)
            with levels_left():
                self._operations.add(finished.batch)
        return finished

    def loss_came(self, loss: Loss) -> None:
        """Note what the script has computed from the outputs of the model."""
        if self._calls:
            with loss.read() as batch, levels_left():
                self._operations.add(batch, is_of_loss=True)

    loss_heard = loss_came

    def gradients_came(self) -> None:
        """Note the gradients that a backward has made."""
        self._optimizers.backward_ended()

    def closes(self) -> None:
        """End the last step and the files."""
        if self not in _open:
            return
        _open.discard(self)
        self._optimizers.close()
        self._end()
        if self._steps <= IN_ONE:  # or it is a part of a model that was called once by itself
            self._end_step()
        self._stage.end()

    @property
    def folder(self) -> Path | None:
        """Of the history; None before the first step has ended, and if it has broken off."""
        run = self._stage.run
        return None if run is None or run.broke_off else run.folder

    def _register(self, series: Series) -> None:
        self._series.append(series)
        if self._stage.run is not None:
            self._stage.run.register(series)

    def _opened(self) -> Run:
        """The run, which begins with its first row: many models of a script are never trained."""
        stage = self._stage
        if stage.run is None:
            model = self._model()
            folder = stage.folder(self.recorder.held_as or class_name(type(model)))
            stage.run = Run(folder, self._rank, _about(model), self._series, self._named)
        return stage.run

    def _end_step(self) -> None:
        """Write down the step that runs, if it has made all that belongs to it."""
        if not self._steps and not (self._calls and self._has_optimizer is False):
            return
        if self._recorder() is None and self._stage.run is None:  # it is gone, and had no step
            return
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        self._step.note(self._step.series("time", "seconds"), seconds, seconds)
        run = self._opened()
        self._operations.captured.ends_step(run.number)
        more, self._calls, self._steps = self._calls - 1, 0, 0
        self._events += run.add(self._step.row(run.number), self._trials.of_step(run.number))
        if self._has_optimizer is False:  # the row holds the calls until that was known
            run.number += max(0, more)

    def _named(self, event: Event) -> Event:
        """An event of a graph that was captured anew, with the operation that has changed."""
        changed = self._operations.captured.change(event.what, event.step)
        if changed is None:
            return event
        evidence = (changed.sentence, *event.evidence[1:])
        return replace(event, what=changed.what, source=changed.source, evidence=evidence)

    def _judge(self) -> Judge:
        return Judge() if self._stage.run is None else self._stage.run.judge

    def _model(self) -> Module | None:
        """The model; None if it is gone."""
        recorder = self._recorder()
        return None if recorder is None else recorder.model

    def _model_that_runs(self) -> Module | None:
        return self._model() if self._stage.has_run else None

    def _model_of_weights(self) -> Module | None:
        return self._model() if self.options.history_weights else None

    def _stepped(self) -> None:
        self._steps += 1
        self._has_optimizer = True

    def _names_of_arguments(self) -> list[str]:
        if self._arguments is None:
            model = self._model()
            try:
                found = inspect.signature(type(model).forward if model is not None else id)
                self._arguments = list(found.parameters)[1:]
            except (TypeError, ValueError):
                self._arguments = []
        return self._arguments

    def _backward_comes(self, roots: list[Tensor], place: Place | None) -> None:
        if not self._calls:  # of another model
            return
        number = 0 if self._stage.run is None else self._stage.run.number
        for root in roots:
            runs, targets = behind(root)
            is_mine = any(self._operations.has_seen(run.event) for run in runs)
            if not is_mine and self._steps:  # and was not called since
                continue
            if (found := self._losses.of_root(root)) is not None:
                series = self._step.series("loss", "loss", named_line(place))
                self._step.later(series, *found)
                self._trials.loss_comes(series, root, *found, number)
                for target in targets:
                    if self._operations.read.has_noted(target):
                        continue  # by its name
                    note_data(self._step, "target", "targets", target)


def _is_frozen(model: Module | None) -> bool:
    """Whether a model has weights, and none of them is trained now: as a feature extractor."""
    weights = iter(()) if model is None else model.parameters()
    first = next(weights, None)
    return first is not None and not (first.requires_grad or any(x.requires_grad for x in weights))


def _about(model: Module | None) -> dict[str, str]:
    """What a history says of its run."""
    return {
        "model": class_name(type(model)),
        "script": os.path.basename(sys.argv[0]) if sys.argv else "",
        "torch": torch.__version__,
    }


@atexit.register
def _close_all() -> None:
    for each in tuple(_open):
        each.closes()
