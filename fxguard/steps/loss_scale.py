"""The scale of the loss, from the GradScaler that skips steps with bad gradients, or the script."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence

from torch.amp.grad_scaler import GradScaler

from fxguard.batch.kept_run import KeptRun
from fxguard.capture.instances import instances_of
from fxguard.graph.poles import plain
from fxguard.verdict.loss_scale import LARGE_FACTOR

__all__ = ["LossScale"]

# The gradient of a scaled loss is the scale or smaller, because the loss may be divided by the
# number of batches in a step, or have a weight of its own.
SMALLEST_SHARE = 2.0**-12


class LossScale:
    """The scale of the losses of one model.

    Args:
        said: what the user specified: a number, or a function that returns one.
    """

    def __init__(self, said: float | Callable[[], float] | None) -> None:
        self.said = said
        self.may_be_own = False  # whether a number that a script multiplies its loss by counts
        self._count = 0  # how often garbage may have been among the scalers found

    def now(self, scalers: Iterable[GradScaler] | None, kept: Sequence[KeptRun]) -> float | None:
        """The scale of the loss whose backward has ended; None if it has none.

        Args:
            scalers: those that scaled the loss. None if nobody followed it: then all scalers of the
                process that may have scaled it are considered.
            kept: the graph runs that gradients reached, in the order of their forward.
        """
        if self.said is not None:
            return float(self.said() if callable(self.said) else self.said)
        if scalers is not None:
            own = own_scale(kept) if self.may_be_own else None
            return max(map(scale_of, scalers), default=own)
        scales = [scale_of(scaler) for scaler in self._alive()]
        return max((scale for scale in scales if may_have_come(scale, kept)), default=None)

    def _alive(self) -> list[GradScaler]:
        """The process's scalers that are enabled and have scaled something.

        All objects of the process are searched, which happens only for a detection. An unreachable
        scaler scales nothing, but collecting garbage takes long, so it is done only the first time,
        the second, the fourth, …
        """
        found = _have_scaled()
        if found:
            self._count += 1
            if not self._count & (self._count - 1):
                del found  # a list would keep them alive
                gc.collect()
                return _have_scaled()
        return found


def _have_scaled() -> list[GradScaler]:
    scalers = instances_of(GradScaler)
    # From its first use on, a scaler holds its scale in a tensor.
    return [each for each in scalers if each.is_enabled() and each._scale is not None]


def scale_of(scaler: GradScaler) -> float:
    """The scale of a GradScaler; 1 if it is switched off."""
    return float(scaler.get_scale())


def own_scale(kept: Sequence[KeptRun]) -> float | None:
    """The power of two that a script multiplies a loss by, last of all; None if it does not.

    A script that scales its loss without a GradScaler skips steps with bad gradients, too.
    """
    for step in reversed(kept[-1].event.plan.steps if kept and kept[-1].of_tape else ()):
        name = plain(step.kind)
        if name == "mul" and len(step.inputs) == 1:
            scales = [abs(x) for x in step.literals if abs(x) >= LARGE_FACTOR]
            return next((x for x in scales if math.frexp(x)[0] == 0.5), None)
        if name != "div":  # by the number of micro-batches
            break
    return None


def may_have_come(scale: float, kept: Sequence[KeptRun]) -> bool:
    """Whether a backward may have begun with a loss that was multiplied by this scale.

    If a model returns its loss, the incoming gradient is known.
    """
    numbers = [x for run in kept[-1:] for x in run.incoming.values() if x.numel() == 1]
    gradients = [abs(float(x)) for x in numbers]
    return all(x >= scale * SMALLEST_SHARE or not math.isfinite(x) for x in gradients)
