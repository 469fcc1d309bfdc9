"""A guarded model in whole training steps: losses made of its outputs, and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import LOSS
from fxguard.batch.loss import Loss
from fxguard.guard._backward import BackwardPasses
from fxguard.guard._delivery import Delivery
from fxguard.guard._names import Names
from fxguard.guard._optimizer import OptimizerSteps
from fxguard.guard.losses import Losses

__all__ = ["WholeStep"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


class WholeStep:
    """The owner of losses, as :class:`fxguard.batch.loss.Owner`.

    Args:
        losses: of the stretch of a script that is watched; other models may be a part of it.
        names: of the model.
        delivery: of its reports.
        backward: its backward passes; None where nobody looks at them.
    """

    def __init__(
        self, losses: Losses, names: Names, delivery: Delivery, backward: BackwardPasses | None
    ) -> None:
        self.losses = losses
        self.names = names
        self.delivery = delivery
        self.backward = backward
        self._optimizers = OptimizerSteps(
            names.tensors, self._largest_gradient, delivery.stepped, delivery.step_spoilt
        )

    def returned(self, batch: Batch, output: Any) -> None:
        """The model has returned, and its batch has ended."""
        self.losses.returned(batch, output, self.names, self)

    def close(self) -> None:
        """Look at no optimizer any more."""
        self._optimizers.close()
        self.delivery.scalers = None

    def loss_comes(self, loss: Loss, roots: Iterable[Tensor]) -> None:
        """Gradients may come to these parts of what was made of outputs of the model."""
        self.delivery.scalers = loss.scalers
        if self.backward is not None:
            index = LOSS + len(loss.batch.events) - 1
            self.backward.tape_left(loss.tape, roots, loss.batch.number, index)

    def loss_graph_ran(self, loss: Loss, run: GraphRun, outputs: Sequence[Any]) -> None:
        """A graph of a loss has returned, to which gradients may come."""
        if self.backward is not None:
            index = LOSS + len(loss.batch.events)
            self.backward.graph_ran(run, outputs, loss.batch.number, index)

    def judge_loss(self, loss: Loss) -> None:
        """Say what is wrong with it."""
        self.delivery.judge_loss(loss)

    def _largest_gradient(self) -> float:
        return 0.0 if self.backward is None else self.backward.largest
