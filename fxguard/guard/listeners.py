"""What a tool hears of one guarded model, and what it may add.

The core names no tool: :mod:`fxguard.api.listening` makes the list from the user's options.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch.nn import Module

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.frames import FrameView
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.loss import Loss
from fxguard.findings import Origin
from fxguard.guard.detection import Detection
from fxguard.options import Options
from fxguard.records import Frame
from fxguard.report.quiet_fault import QuietFault
from fxguard.report.report import Report
from fxguard.steps.known_steps import KnownSteps
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin
from fxguard.verdict.report_of import Finished

__all__ = [
    "Listener",
    "MakeListeners",
    "Recorded",
    "hears_of_all",
    "hears_of_calls",
    "hears_of_gradients",
]


class Recorded(Protocol):
    """What a listener may ask about the guarded model. ``guard/recorder.py`` answers."""

    options: Options
    view: FrameView  # which frames of a batch are shown
    held_as: str  # the name that a script has for the model; "" for none
    optimizer_step: int | None
    notes: dict[str, Origin]  # findings that did no harm, by their message
    steps: KnownSteps  # what is known of optimizers' steps while a script is watched

    @property
    def model(self) -> Module | None:
        """The model; None for the graphs of a backend, or if the model is gone."""

    def earlier_frames(self, wanted: int, *, but: Batch | None = None) -> list[Frame]:
        """The last frames of earlier batches, in order of execution."""

    def frames_of(
        self,
        finished: Finished,
        on_progress: Callable[[float], object] | None = None,
        *,
        just_ended: bool = False,
    ) -> list[Frame]:
        """All frames of a finished batch."""

    def frames_of_loss(self, batch: Batch) -> list[Frame]:
        """All frames of what a script has computed so far from the outputs of batches."""

    def first_bad_of_loss(self, batch: Batch) -> Frame | None:
        """What first made an inf or a NaN there."""


class Listener:
    """A tool, beside one guarded model. Each method does nothing here.

    Threads that call the model share it. What a method raises reaches the script, except in
    :meth:`reports`, :meth:`reports_backward` and :meth:`reports_rest`.

    Args:
        recorder: the batches of the model. A listener does not keep them alive.
    """

    def __init__(self, recorder: Recorded) -> None:
        self.options = recorder.options
        self._recorder = weakref.ref(recorder)

    @property
    def recorder(self) -> Recorded:
        """The batches of the model."""
        found = self._recorder()
        assert found is not None  # it calls
        return found

    @property
    def path(self) -> Path | None:
        """The file that it writes; None before, or if it writes none."""
        return None

    @property
    def folder(self) -> Path | None:
        """The folder of its history; None before, or if it keeps none."""
        return None

    @property
    def quiet_faults(self) -> Sequence[QuietFault]:
        """What it has found wrong with the training that raises nothing."""
        return ()

    def watches_steps(self) -> None:
        """Called when the losses and optimizers of the model are watched from now on."""

    def leaves_steps(self) -> None:
        """Called when they no longer are."""

    def begins(self, batch: Batch) -> None:
        """Called when a batch begins; to add a :class:`~fxguard.batch.watchers.BatchWatcher`."""

    def called(self, runs: Sequence[GraphRun]) -> None:
        """Called when a call of the model has ended, whatever it was.

        Args:
            runs: of graphs, in their order.
        """

    def read(self, finished: Finished, error: Exception | None) -> Finished:
        """Called when a batch was judged and is still open.

        Args:
            finished: the batch, and what was found so far.
            error: what its forward raised; None if it returned.

        Returns:
            The same, or with more.
        """
        return finished

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report on a forward or a loss, with what the tool knows of its first origin."""
        return report

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """The report on a backward, likewise."""
        return report

    def reports_rest(self, report: Report) -> Report:
        """Any other report: on an optimizer's step, or on lost gradients."""
        return report

    def ended(self, finished: Finished) -> None:
        """Called when a batch has ended, before its report is told."""

    def told(self, detection: Detection) -> None:
        """Called when a report was printed, before an exception is raised."""

    def loss_came(self, loss: Loss) -> None:
        """Called when a script has computed a loss, before its backward."""

    def loss_heard(self, loss: Loss) -> None:
        """The same where another model returned later, whose tools hear ``loss_came``."""

    def backward_ended(self, kept: Sequence[KeptRun]) -> None:
        """Called with the graph runs that gradients reached, in the order of their forward."""

    def gradients_came(self) -> None:
        """Called when a backward has ended that brought gradients to leaves of the model."""

    def stepped(self, number: int, frames: Callable[[], Sequence[Frame]]) -> None:
        """Called when an optimizer has made a step.

        Args:
            number: number of the last batch.
            frames: makes the frames of the step.
        """

    def closes(self) -> None:
        """Called when the model is no longer guarded, and when the process ends."""

    def coverage(self) -> str:
        """Text, to end the line, on what the tool could not judge; "" for nothing."""
        return ""


def hears_of_all(listener: Listener) -> bool:
    """Whether a tool hears of each batch, also of healthy ones."""
    kind = type(listener)
    return kind.read is not Listener.read or kind.ended is not Listener.ended


def hears_of_gradients(listener: Listener) -> bool:
    """Whether a tool hears of each backward, also of healthy ones."""
    return type(listener).gradients_came is not Listener.gradients_came


def hears_of_calls(listener: Listener) -> bool:
    """Whether a tool hears of each call of the model."""
    return type(listener).called is not Listener.called


MakeListeners = Callable[[Recorded], Sequence[Listener]]
