"""Keeps the history of one guarded model: a row of numbers for each step of its training."""

from __future__ import annotations

import atexit
import inspect
import itertools
import os.path
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.batch import Batch
from fxguard.batch.loss import Loss
from fxguard.graph.nodes import class_name
from fxguard.guard.listeners import Listener, Recorded
from fxguard.history._backwards import hear_of_backwards
from fxguard.history._buffers import Buffers
from fxguard.history._data import behind, note_data, note_inputs
from fxguard.history._judge import Judge, not_known
from fxguard.history._losses import Losses
from fxguard.history._news import News
from fxguard.history._open_step import OpenStep
from fxguard.history._operations import Operations, named_line
from fxguard.history._resumed import Beginning, judged, last_rows
from fxguard.history._series import Row, Series
from fxguard.history._trials import Trials
from fxguard.history._tried import with_trial
from fxguard.history._weights import WeightsOfOptimizer
from fxguard.history._writer import Writer, need_pyarrow
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.event import Event
from fxguard.source.lines import Place
from fxguard.steps.step_hooks import StepHooks
from fxguard.verdict.report_of import Finished

__all__ = ["Histories"]

_open: weakref.WeakSet[Histories] = weakref.WeakSet()  # whose files are to be ended

_moments = itertools.count(1)  # when models were guarded, and called with gradients

WITHOUT = 16  # calls with gradients and without an optimizer's step: from then on each is a step


class Histories(Listener):
    """Notes what happens in each step, writes it down, and tells of events.

    A step ends with the steps of optimizers, when the model is called again. Calls without
    gradients, such as an evaluation, are no part of one.

    Args:
        recorder: the batches of the model.
    """

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder)
        need_pyarrow()
        self.writer: Writer | None = None  # None before the first step has ended
        self._news: News  # likewise
        self._rank = (0, 1)  # and how many ranks there are
        self.judge = Judge()
        self._beginning: Beginning | None = None  # of a run that was resumed
        self._series: list[Series] = []
        self.step = OpenStep(self._register)
        self.operations = Operations(self.step)
        self._losses = Losses()
        self.trials = Trials(lambda: self.judge, self._model_of_weights)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, WeightsOfOptimizer]
        self._optimizers = weakref.WeakKeyDictionary()
        self._buffers: Buffers | None = None  # None before the first call
        self._arguments: list[str] | None = None  # names of the model's positional ones
        self._calls = 0  # with gradients since the last step
        self._has_run = False  # with gradients: parts of a model that run inside it never do
        self._form: object = None  # what it has in common with another object of the same model
        self._made, self._last_call = next(_moments), 0  # when; counted over all models
        self._is_apart = False  # another object has gone on with its history, and it as well
        self._has_stepped = False  # since the row began
        self._has_optimizer: bool | None = None  # None while that is not known
        self.number = 0  # of the step that runs
        self._counts = False  # whether the batch that runs is one of a training
        self._begun = time.perf_counter()
        self._hooks = StepHooks(self._before, self._after)
        self._end = hear_of_backwards(self._backward_comes)
        _open.add(self)

    def begins(self, batch: Batch) -> None:
        """End the step before."""
        if self._has_optimizer is None and self._calls >= WITHOUT:
            self._has_optimizer = False
        if self._is_over:
            self._close()
        self._counts = torch.is_grad_enabled()
        if self._counts and not self._calls and (model := self.recorder.model) is not None:
            if self._buffers is None:
                self._buffers = Buffers(self.step, model)
            self._buffers.note()
        if not self._has_run:
            self._rank = agreement.rank_and_count()  # a script may destroy the group before its end
        self._calls += self._counts
        if self._counts:
            self._last_call = next(_moments)
            if not self._has_run:
                self._has_run = True
                self._form = _form_of(self.recorder.model)

    def read(self, finished: Finished, error: Exception | None) -> Finished:
        """Note what the model was given, and what its operations have made."""
        if self._counts:
            if (call := finished.batch.call) is not None:
                note_inputs(self.step, self._names_of_arguments(), call.args, call.kwargs)
            self.operations.add(finished.batch)
        return finished

    def loss_came(self, loss: Loss) -> None:
        """Note what the script has computed from the outputs of the model."""
        if self._calls:
            with loss.read() as batch:
                self.operations.add(batch, is_of_loss=True)

    def gradients_came(self) -> None:
        """Note the gradients that a backward has made."""
        for weights in self._optimizers.values():
            weights.backward_ended()

    def closes(self) -> None:
        """End the last step and the files."""
        if self not in _open:
            return
        _open.discard(self)
        self._hooks.close()
        self._end()
        if self._is_over:
            self._close()
        if self.writer is not None:
            self._news.close()
            self.writer.close()

    @property
    def folder(self) -> Path | None:
        """Of the history; None before the first step has ended."""
        return None if self.writer is None else self.writer.folder

    @property
    def _is_over(self) -> bool:
        """Whether the step that runs has made all that belongs to it."""
        return self._has_stepped or (self._calls > 0 and self._has_optimizer is False)

    def _register(self, series: Series) -> None:
        self._series.append(series)
        self.judge.register(series)
        if self.writer is not None:
            self.writer.register(series)

    def _opened(self) -> Writer:
        """The files, which begin with the first step: many models of a script are never trained."""
        if self.writer is None:
            rank, count = self._rank
            before = self._before_this()
            folder = _folder_of(self) if before is None else before.hand_over()
            self.writer = Writer(folder, rank=rank, about=_about(self))
            self._news = News(self.writer.folder, rank, count)
            self.number = self.writer.next_step
            for series in self._series:
                self.writer.register(series)
            rows = last_rows(self.writer.folder, rank, self._series, self.number)
            self.judge = judged(self._series, rows)
            self._beginning = Beginning(self._series, rows) if rows else None
            weakref.finalize(self, self.writer.close)  # if the model is gone
        return self.writer

    def _before_this(self) -> Histories | None:
        """The history of the same model as another object, whose training had ended by then.

        So scripts resume in one process.
        """
        alike = (
            each
            for each in _open
            if each.writer is not None
            and not self._is_apart
            and each.options.history == self.options.history
            and each._form == self._form
            and each._last_call < self._made
        )
        return max(alike, key=lambda each: each._last_call, default=None)

    def hand_over(self) -> Path:
        """End this run, for another object to go on with it; the folder."""
        assert self.writer is not None
        if self._is_over:
            self._close()
        self._news.close()
        self.writer.close()
        folder, self.writer, self._is_apart = self.writer.folder, None, True
        return folder

    def _close(self) -> None:
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        self.step.note(self.step.series("time", "seconds"), seconds, seconds)
        writer = self._opened()
        row = self.step.row(self.number)
        if self._beginning is not None:
            self._beginning.take(row)
        self.number += 1
        self._calls, self._has_stepped = 0, False
        writer.add(row)
        events = self._as_before(self._events_of(row), row)
        for event in events:
            writer.event(event)
        self._news.tell(events)

    def _events_of(self, row: Row) -> list[Event]:
        trial = self.trials.of_step(row.step)
        found = self.judge.seen(row, not_known if trial is None else trial.shows_data)
        return [with_trial(self._named(event), trial, self._series) for event in found]

    def _as_before(self, events: list[Event], row: Row) -> list[Event]:
        """The events of a step; none if a resumed run turns out to be another training."""
        if self._beginning is None:
            return events
        elsewhere = self._beginning.elsewhere(events)
        events = [*map(self._beginning.in_words, events)]
        if elsewhere:
            self.judge = judged(self._series, self._beginning.rows)
            if not self._rank[0]:
                terminal.write(f"fxguard: {elsewhere}", sys.stderr)
        if elsewhere or self._beginning.is_over:
            self._beginning = None
        return [] if elsewhere else events

    def _named(self, event: Event) -> Event:
        """An event of a graph that was captured anew, with the operation that has changed."""
        changed = self.operations.captured.of_series(event.what)
        if changed is None:
            return event
        evidence = (changed.sentence, *event.evidence[1:])
        return replace(event, what=changed.what, source=changed.source, evidence=evidence)

    def _model_of_weights(self) -> Module | None:
        return self.recorder.model if self.options.history_weights else None

    def _names_of_arguments(self) -> list[str]:
        if self._arguments is None:
            model = self.recorder.model
            try:
                found = inspect.signature(type(model).forward if model is not None else id)
                self._arguments = list(found.parameters)[1:]
            except (TypeError, ValueError):
                self._arguments = []
        return self._arguments

    def _backward_comes(self, roots: list[Tensor], place: Place | None) -> None:
        if not self._calls:  # of another model
            return
        for root in roots:
            runs, targets = behind(root)
            is_mine = any(self.operations.has_seen(run.event) for run in runs)
            if not is_mine and self._has_stepped:  # and was not called since
                continue
            if (found := self._losses.of_root(root)) is not None:
                series = self.step.series("loss", "loss", named_line(place))
                self.step.later(series, *found)
                self.trials.loss_comes(series, root, *found, self.number)
                for target in targets:
                    note_data(self.step, "target", "targets", target)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights_of(optimizer)
        if weights is not None:
            weights.before()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights_of(optimizer)
        if weights is not None:
            weights.after(optimizer)
            self._has_stepped = self._has_optimizer = True

    def _weights_of(self, optimizer: Optimizer) -> WeightsOfOptimizer | None:
        """The weights of the model that an optimizer steps; None for none, as in a mere part."""
        if not self._has_run:
            return None
        found = self._optimizers.get(optimizer)
        if found is None or not found.is_of(optimizer):
            model = self.recorder.model
            names = {} if model is None else {id(x): name for name, x in model.named_parameters()}
            found = self._optimizers[optimizer] = WeightsOfOptimizer(self.step, optimizer, names)
        return found if found.is_of_model else None


def _form_of(model: Module | None) -> object:
    """What two objects of the same model have in common."""
    weights = () if model is None else model.named_parameters()
    return class_name(type(model)), tuple((name, x.shape) for name, x in weights)


def _folder_of(history: Histories) -> Path:
    """The folder that was asked for; one inside it while another model of the process has it."""
    asked, model = Path(history.options.history or ""), history.recorder.model
    name = history.recorder.held_as or class_name(type(model))
    taken = {each.folder for each in _open}
    inside = (asked / (f"{name} {n}" if n > 1 else name) for n in itertools.count(1))
    return next(folder for folder in itertools.chain((asked,), inside) if folder not in taken)


def _about(history: Histories) -> dict[str, str]:
    """What a history says of its run."""
    model = history.recorder.model
    return {
        "model": class_name(type(model)),
        "script": os.path.basename(sys.argv[0]) if sys.argv else "",
        "torch": torch.__version__,
    }


@atexit.register
def _close_all() -> None:
    for each in tuple(_open):
        each.closes()
