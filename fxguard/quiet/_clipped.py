"""Gradients that are clipped while a GradScaler still scales them."""

from __future__ import annotations

from fxguard.batch.late_writes import LateWrite
from fxguard.quiet._training import Rule, Step, Training
from fxguard.source.assigned import statement_at
from fxguard.source.lines import source_at

__all__ = ["ClippedBeforeUnscaled"]

UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
CLIPS = ("clip_grad_norm", "clip_grad_value", "clip_grads_with_norm")
TWICE = 2


class ClippedBeforeUnscaled(Rule):
    """Finds a call of torch's functions that clip, and behind it that of the scaler."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._times = 0

    def before(self, step: Step) -> None:
        if not self.training.is_scaled() or self.training.has("clipped before unscaled"):
            return
        if (writes := self.training.writes()) is None:
            return
        weight = next((x for x in step.weights.values() if x.grad is not None), None)
        found = [] if weight is None else list(writes.of_gradient(weight))
        # None behind the step of another optimizer: nobody sees what is written then.
        scaled = next((i for i, each in enumerate(found) if each.kind in UNSCALES), None)
        clip = next((each for each in found[:scaled] if _clips(each)), None)
        if clip is None:
            return
        self._times += 1
        if self._times == TWICE:
            self.training.found(
                "clipped before unscaled",
                "gradients are clipped while the scaler's factor is in them",
                place=clip.place,
                evidence="the scaler takes its factor away behind that"
                + (f" ({found[scaled]})" if scaled is not None else ""),
                advice="call scaler.unscale_(optimizer) before the clipping",
            )


def _clips(write: LateWrite) -> bool:
    """Whether a line clips, at a bound that does not have the scaler's factor, too."""
    code = statement_at(source_at(write.place))
    return any(name in code for name in CLIPS) and "scale" not in code
