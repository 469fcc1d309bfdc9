"""The losses of a step: the numbers that backwards begin with, before a GradScaler."""

from __future__ import annotations

import math
import weakref

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from fxguard.capture.instances import instances_of
from fxguard.measure.at_hand import own_arithmetic

__all__ = ["Losses"]

LEAST_SCALE = 128.0
SEARCHES = 3  # for scalers among all objects of the process


class Losses:
    """Tells what a script's loss was, of the root of a backward."""

    def __init__(self) -> None:
        self._scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._searches = 0

    def of_root(self, root: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The loss as a copy, and what it is to be divided by; None if the root is no number."""
        if root.numel() != 1 or type(root) is not Tensor or root.is_complex():
            return None
        with own_arithmetic():
            return root.detach().clone(), self._scale_of(root)

    def _scale_of(self, root: Tensor) -> Tensor | None:
        """The scale of the GradScaler that made the root, as it is now."""
        node = root.grad_fn
        if node is None or type(node).__name__ != "MulBackward0":
            return None
        factor = node._saved_other  # type: ignore[attr-defined]
        if not isinstance(factor, Tensor) or factor.numel() != 1:
            return None
        if not self._is_a_scale(factor) and self._searches < SEARCHES:
            self._searches += 1
            self._scalers.update(instances_of(GradScaler))
        is_own = factor.is_cpu and _is_own_scale(float(factor))  # on a GPU that would wait
        is_scale = self._is_a_scale(factor) or is_own
        return factor.detach().clone() if is_scale else None

    def _is_a_scale(self, factor: Tensor) -> bool:
        scales = [scaler._scale for scaler in self._scalers]
        return any(x is not None and x.data_ptr() == factor.data_ptr() for x in scales)


def _is_own_scale(factor: float) -> bool:
    """Whether a script scales its loss so itself: by a large power of two."""
    return LEAST_SCALE <= factor < math.inf and math.frexp(factor)[0] == 0.5
