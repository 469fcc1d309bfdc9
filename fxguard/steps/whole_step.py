"""A guarded model in whole training steps: losses from its outputs, and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.brief import BriefBatch
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import LOSS
from fxguard.batch.loss import Loss
from fxguard.install.names import Names
from fxguard.steps._optimizer import OptimizerSteps
from fxguard.steps._spoilt_steps import SpoiltSteps, may_be_scaled
from fxguard.steps._step_reports import StepReports
from fxguard.steps.backward import BackwardPasses
from fxguard.steps.losses import Losses

__all__ = ["WholeStep"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


class WholeStep:
    """The owner of losses, as :class:`fxguard.batch.loss.Owner`.

    Args:
        losses: losses of the watched stretch of a script, which may involve other models.
        names: the names in the model.
        reports: who reports on it.
        backward: its backward passes; None if nobody looks at them.
    """

    def __init__(
        self, losses: Losses, names: Names, reports: StepReports, backward: BackwardPasses | None
    ) -> None:
        self.losses = losses
        self.names = names
        self.reports = reports
        self.backward = backward
        self._spoilt = SpoiltSteps(reports, backward, lambda: losses.writes)
        reports.steps.writes = lambda: losses.writes
        self._optimizers = OptimizerSteps(
            names.tensors,
            self._largest_gradient,
            reports.stepped,
            self._spoilt.by_step,
            self._spoilt.before_step,
            self._spoilt.restored,
            self._spoilt.ended,
            lambda: losses.writes,
        )

    def returned(self, batch: Batch | BriefBatch, output: Any) -> None:
        """Called when the model has returned and its batch has ended."""
        self.losses.returned(batch, output, self.names, self)

    def close(self) -> None:
        """Stop watching optimizers."""
        self._optimizers.close()
        self.reports.steps.scalers = None
        self.reports.steps.writes = None

    def loss_comes(self, loss: Loss, roots: Iterable[Tensor]) -> None:
        """Called when gradients may come to these tensors, computed from outputs of the model."""
        self.reports.steps.scalers = loss.scalers
        roots = tuple(roots)
        self._spoilt.loss_comes(is_scaled=bool(loss.scalers) and all(map(may_be_scaled, roots)))
        if self.backward is not None:
            index = LOSS + loss.events_so_far - 1
            self.backward.tape_left(loss.tape, roots, loss.batch.number, index)

    def loss_graph_ran(self, loss: Loss, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Called when a graph of a loss has returned; gradients may come to it."""
        if self.backward is not None:
            index = LOSS + loss.events_so_far
            self.backward.graph_ran(run, outputs, loss.batch.number, index)

    def judge_loss(self, loss: Loss) -> None:
        """Report what is wrong with a loss."""
        self.reports.judge_loss(loss)

    def hear_loss(self, loss: Loss) -> None:
        """Let tools hear of a loss that another model's guard judges."""
        self.reports.hear_loss(loss)

    def _largest_gradient(self) -> float:
        return 0.0 if self.backward is None else self.backward.largest
