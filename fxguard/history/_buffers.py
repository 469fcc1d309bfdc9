"""Buffers of a model, as a forward finds them, as series."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fxguard.history._norms import norms
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import is_plain, sample_of
from fxguard.history._series import BUFFER
from fxguard.measure.at_hand import own_arithmetic

__all__ = ["Buffers"]


class Buffers:
    """Notes buffers when a step begins: what the step before has updated belongs to it no more.

    Args:
        step: the step that runs.
        model: looked at, and not kept.
    """

    def __init__(self, step: OpenStep, model: Module) -> None:
        self.step = step
        held = [(name, x) for name, x in model.named_buffers() if is_plain(x)]
        self._names = [name for name, x in held if x.is_floating_point() and x.numel()]
        with own_arithmetic():
            self._copies = tuple([sample_of(model.get_buffer(x)).clone() for x in self._names])
        self._drifts = [step.series("drift", name, detail=BUFFER) for name in self._names]
        self._sizes = [step.series("weight", name, detail=BUFFER) for name in self._names]

    def note(self, model: Module) -> None:
        """Note how large they are, and how much they have changed since the last step began."""
        if not self._names:
            return
        with own_arithmetic():
            samples = self._samples(model)
            if samples is None:
                return
            changes, sizes = norms(samples, self._copies), norms(samples)
            self.step.note_all(self._drifts, changes, sizes)
            self.step.note_all(self._sizes, sizes)

    def _samples(self, model: Module) -> tuple[Tensor, ...] | None:
        """None if they are others now."""
        try:
            found = [model.get_buffer(name) for name in self._names]
        except AttributeError:
            return None
        if not all(map(is_plain, found)):
            return None
        samples = tuple([sample_of(x) for x in found])
        pairs = zip(samples, self._copies, strict=True)
        same = all(
            x.shape == y.shape and x.dtype == y.dtype and x.device == y.device for x, y in pairs
        )
        return samples if same else None
