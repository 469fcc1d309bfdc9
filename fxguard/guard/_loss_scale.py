"""The scale of the loss: of the GradScaler that skips steps with bad gradients."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence

from torch.amp.grad_scaler import GradScaler

from fxguard.batch.kept_run import KeptRun

__all__ = ["LossScale"]

# The gradient of a loss that was scaled is the scale, or smaller: the loss is divided by the number
# of batches in a step, or has a weight of its own.
SMALLEST_SHARE = 2.0**-12


class LossScale:
    """The scale of the losses of one model.

    Args:
        said: what the user says: a number, or a function that returns one.
    """

    def __init__(self, said: float | Callable[[], float] | None) -> None:
        self.said = said
        self._count = 0  # of times that garbage may have been among what was found

    def now(self, scalers: Iterable[GradScaler] | None, kept: Sequence[KeptRun]) -> float | None:
        """That of the loss whose backward has ended; None where it has none.

        Args:
            scalers: those that have scaled the loss; None where nobody has followed it. Then they
                are those of the process that may have scaled it.
            kept: the runs of graphs that gradients came to, in the order of their forward.
        """
        if self.said is not None:
            return float(self.said() if callable(self.said) else self.said)
        if scalers is not None:
            return max(map(scale_of, scalers), default=None)
        scales = [scale_of(scaler) for scaler in self._alive()]
        return max((scale for scale in scales if may_have_come(scale, kept)), default=None)

    def _alive(self) -> list[GradScaler]:
        """Those of the process that are enabled and have scaled something.

        All its objects are looked through: for a detection only. A scaler that nobody can reach
        scales nothing, but collecting garbage takes long: it is done the first time, the second,
        the fourth, …
        """
        if _has_scaled():
            self._count += 1
            if not self._count & (self._count - 1):
                gc.collect()
        return _has_scaled()


def _has_scaled() -> list[GradScaler]:
    scalers = [each for each in gc.get_objects() if issubclass(type(each), GradScaler)]
    # A tensor holds the scale from the first time on.
    return [each for each in scalers if each.is_enabled() and each._scale is not None]


def scale_of(scaler: GradScaler) -> float:
    """The scale of a GradScaler; 1 where it is switched off."""
    return float(scaler.get_scale())


def may_have_come(scale: float, kept: Sequence[KeptRun]) -> bool:
    """Whether a backward may have begun with a loss that was multiplied by this.

    Of a model that returns its loss it is known what came in.
    """
    numbers = [x for run in kept[-1:] for x in run.incoming.values() if x.numel() == 1]
    gradients = [abs(float(x)) for x in numbers]
    return all(x >= scale * SMALLEST_SHARE or not math.isfinite(x) for x in gradients)
