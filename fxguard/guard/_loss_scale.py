"""The scale of the loss: of the GradScaler that skips steps with bad gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from torch.amp.grad_scaler import GradScaler

__all__ = ["loss_scale_now"]


def loss_scale_now(
    said: float | Callable[[], float] | None, scalers: Iterable[GradScaler] | None
) -> float | None:
    """The scale of the loss; None where there is none.

    Args:
        said: what the user says: a number, or a function that returns one.
        scalers: those that have scaled the loss; None where nobody has followed it. Then they are
            those that are alive, enabled, and have scaled something: all objects of the process are
            looked through, for a detection only.
    """
    if said is not None:
        return float(said() if callable(said) else said)
    if scalers is None:
        gc.collect()  # a scaler that nobody can reach scales nothing
        scalers = (each for each in gc.get_objects() if issubclass(type(each), GradScaler))
    scales = [float(each.get_scale()) for each in scalers if each.is_enabled() and has_scaled(each)]
    return max(scales, default=None)


def has_scaled(scaler: GradScaler) -> bool:
    """Whether a scaler has scaled anything: a tensor holds its scale from then on."""
    return scaler._scale is not None
