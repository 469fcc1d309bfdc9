"""The backwards of a model in a wide dtype: its gradients, and how large they would be."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from fxguard.comparison._rounding import size_of

__all__ = ["Backwards", "Turn"]


# How many times the signs of gradients are drawn: a sum of few terms may cancel once again.
TRIALS = 2


class Turn(Enum):
    """Which backward is running."""

    MODEL = auto()  # in the model's own dtype
    SIZES = auto()  # in the wide one, with signs that are drawn on the way
    REFERENCE = auto()  # in the wide one


class Backwards:
    """Runs the backwards of a model for hooks on its edges. One object serves all its graphs.

    A gradient that is 0 by mathematics, such as that of a bias in front of a normalization, is a
    sum of terms that cancel. In backwards of their own, the sign of each element is drawn at random
    wherever a gradient enters an operand. Then they do not cancel, and the sum is as large as they
    are.

    Args:
        draws: whether signs are drawn, so that sizes are known.
    """

    def __init__(self, *, draws: bool = True) -> None:
        self.draws = draws
        self.turn: Turn | None = None
        self._signs = torch.Generator().manual_seed(0)

    def of_model(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> None:
        """Run the backward in the model's own dtype; see :meth:`of_reference`."""
        self._run(Turn.MODEL, outputs, leaves, incoming)

    def of_reference(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[float]]:
        """The gradients of leaves in the wide dtype, and how large each is if nothing cancels.

        Sizes are 0 if no signs are drawn.

        Args:
            outputs: what is differentiated; after that it cannot be differentiated again.
            leaves: with respect to what.
            incoming: the gradient that comes in at each output, in any dtype.
        """
        sizes = [0.0] * len(leaves)
        for _ in range(TRIALS if self.draws else 0):
            drawn = self._run(Turn.SIZES, outputs, leaves, incoming)
            of_drawn = [0.0 if x is None else size_of(x) for x in drawn]
            sizes = list(map(max, sizes, of_drawn))
        return self._run(Turn.REFERENCE, outputs, leaves, incoming), sizes

    def signed(self, gradient: Tensor) -> Tensor | None:
        """A gradient that enters an operand, with the signs drawn; None if it goes on as it is."""
        if self.turn is not Turn.SIZES:
            return None
        drawn = torch.randint(0, 2, gradient.shape, generator=self._signs, dtype=torch.int8)
        return gradient * (drawn.to(gradient.device) * 2 - 1)

    def _run(
        self,
        turn: Turn,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        incoming: Sequence[Tensor],
    ) -> list[Tensor | None]:
        self.turn = turn
        try:
            return list(
                torch.autograd.grad(
                    outputs,
                    leaves,
                    [drawn.to(x.dtype) for drawn, x in zip(incoming, outputs, strict=True)],
                    retain_graph=turn is not Turn.REFERENCE,
                    allow_unused=True,
                )
            )
        finally:
            self.turn = None
