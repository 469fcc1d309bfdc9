"""Reports on what a script computes beside its models, or without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.api.listening import guard_with_tools
from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.batch.loss import Loss
from fxguard.errors import FxguardError
from fxguard.forgiving import theirs
from fxguard.graph.random_state import random_state_kept
from fxguard.options import Options
from fxguard.records import Role
from fxguard.report.report import Report
from fxguard.script.again import NotRepeated, Repetition
from fxguard.script.beside import Beside
from fxguard.source.held_tensors import held_name
from fxguard.steps.losses import Losses
from fxguard.steps.step_hooks import StepHooks

__all__ = ["WholeScript"]


class NoModel(Module):
    """In the place of a model."""


class WholeScript:
    """Watches the thread that makes it.

    Args:
        options: those of :func:`fxguard.instrument`.
        losses: those that the script computes.
        on_report: called with each report after it was handed on.
    """

    def __init__(
        self, options: Options, losses: Losses, on_report: Callable[[Report], object]
    ) -> None:
        self._model = NoModel()
        self._guard = guard_with_tools(self._model, options)
        self._guard.delivery.warns_of_idle_globs = False
        self._guard.delivery.heard = on_report
        self._guard.watch_steps(losses)
        self._losses = losses
        self._is_open = True
        self._kept: Report | None = None  # is told at the end
        self._beside = Beside(self._script_read, self._backward_begins, self._gradient_bad)
        self._hooks = StepHooks(self._step_begins, self._step_ended)
        losses.look_beside(self._beside)

    @property
    def count(self) -> int:
        """How many operations were looked at."""
        return self._beside.count

    @property
    def unseen(self) -> int:
        """How many operations could not be looked at."""
        return self._beside.unseen

    def close(self) -> None:
        """Stop watching."""
        if self._is_open:
            self._is_open = False
            self._losses.look_beside(None)
            self._hooks.close()
            self._guard.stop_listening()
            self._guard.stop_watching_steps()

    def model_comes(self) -> None:
        """From now on a bad number counts where a model reads it, or the loss of one."""
        self._beside.has_no_model, self._kept = False, None

    def model_reads(self, args: Any, kwargs: Any) -> None:
        """Called with the arguments of a model, before its call."""
        self._beside.take_read()
        self._beside.handed_on((args, kwargs))

    def instead(self, report: Report) -> Report | None:
        """What made the bad numbers that a model or its loss was given, if that is reported."""
        read = self._beside.take_read()
        if read is None or report.phase not in ("data", "loss") or report.origins[0].is_operation:
            return None
        made = self._report(*read)
        if made is None:
            return None
        why = (*made.why, f"it was read as {report.origins[0].message}")
        return replace(made, batch_number=report.batch_number, why=why)

    def tell(self) -> None:
        """Report the first bad number that the script has read.

        Raises:
            NonFiniteError: if there is one, and ``on_detect="raise"``.
        """
        report, self._kept = self._kept, None
        if report is not None:
            self._guard.delivery.report_later(report)

    def _script_read(self, batch: Batch, by: list[Key]) -> None:
        if self._kept is None:
            self._kept = self._report(batch, by)

    def _backward_begins(self, batch: Batch, by: list[Key]) -> None:
        report = self._report(batch, by)
        if report is not None:
            self._kept = report
            self.tell()

    def _report(self, batch: Batch, ends: list[Key]) -> Report | None:
        """What is to be said of what led to some values; None if they are intended."""
        pairs, batch.ends = list(batch.pairs), ends
        before, self._beside.pauses = self._beside.pauses, True
        try:
            self._begin()
            batch.read()
            return self._guard.recorder.finish_loss(batch).report
        except theirs():  # a second run may fail in any way, and the script is not to
            return None
        finally:
            batch.pairs[:] = pairs
            self._beside.pauses = before

    def _begin(self) -> int:
        """Begin a batch that holds nothing; its number."""
        number = self._guard.recorder.begin().number
        try:
            self._guard.recorder.finish()
        finally:
            self._guard.recorder.here.batch = None
        return number

    def _gradient_bad(self, roots: list[Tensor], gradient: Tensor | None) -> None:
        """Compute once more what led to a backward that made a bad gradient, and repeat that."""
        self._beside.pauses = True
        try:
            self._differentiate_again(roots, gradient)
        except FxguardError:
            raise
        except NotRepeated:
            pass
        except theirs():  # an operation that may not run twice
            pass
        finally:
            self._beside.pauses = False

    def _differentiate_again(self, roots: list[Tensor], gradient: Tensor | None) -> None:
        whole_step = self._guard.whole_step
        assert whole_step is not None
        loss = Loss(self._begin())
        leaves = {id(leaf): leaf.detach().requires_grad_() for leaf in self._beside.leaves()}
        names = {}
        for leaf in self._beside.leaves():
            _, name = held_name(leaf) or (Role.INPUT, "of the script")
            names[id(leaves[id(leaf)])] = Role.WEIGHT, name
        loss.own(whole_step, names, {})
        with random_state_kept(roots):
            repetition = Repetition(roots, loss.observe, leaves)
            again = [repetition.of(root) for root in roots]
            loss.backward_comes(again)
            torch.autograd.backward(again, [gradient] * len(again))

    def _step_begins(self, *_: Any) -> None:
        self._beside.pauses = True

    def _step_ended(self, *_: Any) -> None:
        self._beside.pauses = False
