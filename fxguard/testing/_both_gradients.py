"""The gradients of a backward in two forms, as noted by hooks, and how far apart they are.

An edge is an operand of an operation; its gradient is what this operation alone returns to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from fxguard.plan.plan import Place
from fxguard.rerun.differences import relative_error

__all__ = ["BackwardOfBoth", "BothGradients", "HookOf"]


class Turn(Enum):
    """The form whose backward is running."""

    MODEL = auto()
    SIZES = auto()
    REFERENCE = auto()


@dataclass(slots=True, eq=False)
class GradientOfBoth:
    """One gradient in both forms."""

    low: Tensor | None = None  # kept until it has been compared
    size: float = 0.0  # the largest magnitude if nothing cancelled
    error: float | None = None  # None if one of the two did not come

    def compare(self, reference: Tensor) -> None:
        """Note how far the model's gradient is from that of the reference.

        The error is relative to the largest magnitude of the reference, or to the size if that is
        larger: a gradient may be small because its terms cancel, as at a bias before a
        normalisation, where it is rightly 0.
        """
        if self.low is None:
            return
        error = relative_error(self.low, reference, self.size)
        self.error = max(error, self.error or 0.0)
        self.low = None


@dataclass(slots=True, eq=False)
class BackwardOfBoth:
    """One operation of a graph, seen from its backward."""

    place: Place
    is_differentiable: bool = False
    # By position among the tensors of its arguments.
    edges: dict[int, GradientOfBoth] = field(default_factory=lambda: defaultdict(GradientOfBoth))
    # Of its results, summed over all readers; by position.
    made: dict[int, GradientOfBoth] = field(default_factory=lambda: defaultdict(GradientOfBoth))

    @property
    def error(self) -> float | None:
        """The largest error of a returned gradient; None if nothing could be compared."""
        return _largest(self.edges.values())

    @property
    def error_before(self) -> float:
        """The largest error of an incoming gradient."""
        return _largest(self.made.values()) or 0.0


def _largest(gradients: Iterable[GradientOfBoth]) -> float | None:
    return max((each.error for each in gradients if each.error is not None), default=None)


# Makes a hook that notes a gradient; if the hook returns another one, that goes on.
HookOf = Callable[[GradientOfBoth], Callable[[Tensor], Tensor | None]]


class BothGradients:
    """The backward of a model in both forms, as seen by hooks. One object serves all its graphs.

    The magnitude of a gradient if nothing cancelled is measured in a third backward, which draws
    the sign of each element at random wherever a gradient enters an operand.

    Attributes:
        low: the leaves to differentiate with respect to, in the model's form.
        other: the same in the reference.
    """

    def __init__(self) -> None:
        self.low: list[Tensor] = []
        self.other: list[Tensor] = []
        self._turn: Turn | None = None
        self._signs = torch.Generator().manual_seed(0)

    def add_input(self, low: Tensor, other: Tensor) -> None:
        """Add a leaf to differentiate with respect to, in both forms."""
        self.low.append(low)
        self.other.append(other)

    def differentiate(
        self, low: Sequence[Tensor], other: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run the backward in both forms.

        Args:
            low: what the model returned.
            other: the same in the reference.
            gradients: the incoming gradient of each output.
        """
        wide = [gradient.to(x.dtype) for gradient, x in zip(gradients, other, strict=True)]
        self._run(Turn.MODEL, low, self.low, gradients)
        self._run(Turn.SIZES, other, self.other, wide)
        self._run(Turn.REFERENCE, other, self.other, wide)

    def _run(
        self,
        turn: Turn,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        self._turn = turn
        try:
            torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
        finally:
            self._turn = None

    def of_model(self, gradient: GradientOfBoth) -> Callable[[Tensor], None]:
        """A hook for the model's form of a gradient."""

        def note(value: Tensor) -> None:
            if self._turn is Turn.MODEL:
                gradient.low = value.detach()

        return note

    def of_reference(self, gradient: GradientOfBoth) -> Callable[[Tensor], Tensor | None]:
        """A hook for the reference form of a gradient, which may return another one."""

        def note(value: Tensor) -> Tensor | None:
            if self._turn is Turn.REFERENCE:
                gradient.compare(value.detach())
            elif self._turn is Turn.SIZES:
                finite = value.detach()[value.isfinite()]
                gradient.size = max(gradient.size, float(finite.abs().amax()) if len(finite) else 0)
                return value * self._drawn_signs(value)
            return None

        return note

    def _drawn_signs(self, like: Tensor) -> Tensor:
        drawn = torch.randint(0, 2, like.shape, generator=self._signs, dtype=torch.int8)
        return drawn.to(like.device) * 2 - 1
