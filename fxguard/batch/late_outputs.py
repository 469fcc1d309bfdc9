"""Outputs of guarded models, known beyond the step that ends their loss, and under no_grad."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.live_tensors import LiveTensors

__all__ = ["LateOutputs"]

OUTPUT = Key(BETWEEN_GRAPHS, 0)  # all of them are known under one key
KEPT = 256  # outputs; up to twice as many are known


class LateOutputs:
    """The latest outputs of one thread, by their memory. It keeps no tensor alive."""

    def __init__(self) -> None:
        self._older, self._newer = LiveTensors(), LiveTensors()

    def note(self, outputs: Iterable[Tensor]) -> None:
        """Called with the tensors that a model has returned."""
        if len(self._newer.ids) >= KEPT:
            self._older.clear()
            self._older, self._newer = self._newer, self._older
        for output in outputs:
            self._newer.remember(output, OUTPUT)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is an output, or shares its memory: a view, detached or not."""
        return any(
            live.key_of(tensor) is not None or live.origin_of(tensor) is not None
            for live in (self._newer, self._older)
        )
