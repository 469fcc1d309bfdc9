"""The scale of the loss: of the GradScaler that skips steps with bad gradients."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

__all__ = ["loss_scale_now"]


def loss_scale_now(said: float | Callable[[], float] | None) -> float | None:
    """The scale of the loss; None where there is none.

    Without a word of the user it is the largest of the GradScalers that are alive and enabled. All
    objects of the process are looked through: for a detection only.

    Args:
        said: what the user says: a number, or a function that returns one.
    """
    if said is not None:
        return float(said() if callable(said) else said)
    amp = sys.modules.get("torch.amp.grad_scaler")
    if amp is None:
        return None
    scalers = [each for each in gc.get_objects() if issubclass(type(each), amp.GradScaler)]
    scales = [float(each.get_scale()) for each in scalers if each.is_enabled()]
    return max(scales, default=None)
