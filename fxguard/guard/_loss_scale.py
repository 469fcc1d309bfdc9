"""The scale of the loss: of the GradScaler that skips steps with bad gradients."""

from __future__ import annotations

import gc
import sys

__all__ = ["loss_scale_now"]


def loss_scale_now() -> float | None:
    """The largest scale of the GradScalers that are alive and enabled; None without one.

    All objects of the process are looked through: for a detection only.
    """
    amp = sys.modules.get("torch.amp.grad_scaler")
    if amp is None:
        return None
    scalers = [each for each in gc.get_objects() if issubclass(type(each), amp.GradScaler)]
    scales = [float(each.get_scale()) for each in scalers if each.is_enabled()]
    return max(scales, default=None)
