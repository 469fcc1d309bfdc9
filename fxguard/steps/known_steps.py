"""What is known of a model's training steps, for reports on what comes after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch.amp.grad_scaler import GradScaler

from fxguard.batch.late_writes import LateWrites
from fxguard.steps.scaled_step import ScaledStep
from fxguard.steps.step_rules import Excused

__all__ = ["KnownSteps"]


@dataclass(slots=True)
class KnownSteps:
    """The steps of one model so far. What watches them writes here."""

    are_watched: bool = False
    # Weights that a watched step wrote something bad into: the batch before it, and by whom.
    spoilt: dict[str, tuple[int, str]] = field(default_factory=dict)
    # Weights into whose gradients a backward since the last step brought something bad, with the
    # number of its batch.
    bad_gradients: dict[str, int] = field(default_factory=dict)
    # The last backward, if only the loss scale made its gradients bad.
    excused: Excused | None = None
    # The first step that read gradients which a GradScaler had not unscaled.
    scaled_step: ScaledStep | None = None
    # Those that scaled the last loss; None if nobody followed it.
    scalers: Iterable[GradScaler] | None = None
    # What the script has written since the last backward; None if nobody watches it.
    writes: Callable[[], LateWrites] | None = None
