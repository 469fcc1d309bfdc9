"""Who reports on the training steps of one model, as what watches them sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.batch import Batch
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.loss import Loss
from fxguard.findings import Origin
from fxguard.options import Options
from fxguard.steps.known_steps import KnownSteps
from fxguard.steps.optimizer_step import SteppedWeight

__all__ = ["StepReports"]


class StepReports(Protocol):
    """Reports on one model. ``guard/delivery.py`` hands them on."""

    options: Options

    @property
    def steps(self) -> KnownSteps:
        """What is known of the model's steps."""

    @property
    def model(self) -> Module | None:
        """The model; None if it is gone."""

    @property
    def last_batch(self) -> Batch | None:
        """The last batch that has ended; None before the first."""

    def note(self, origin: Origin) -> None:
        """Keep a finding that did no harm, once for each operation."""

    def judge_loss(self, loss: Loss) -> None:
        """Report bad values that a script computed from outputs of the model."""

    def hear_loss(self, loss: Loss) -> None:
        """Let tools hear of a loss that another model's guard judges."""

    def gradients_lost(self, origin: Origin, number: int) -> None:
        """Report gradients that are 0 because of their dtype."""

    def loss_scale(self, kept: Sequence[KeptRun]) -> float | None:
        """The scale of the loss whose gradients reached these runs; None if there is none."""

    def stepped(self, optimizer: Optimizer, weights: Iterator[SteppedWeight]) -> None:
        """Trace a step of an optimizer, if that was asked for."""

    def weights_spoilt(
        self, describe: Callable[[int], Origin], *, brought_in: int | None = None
    ) -> None:
        """Report weights that were made bad after a backward."""
