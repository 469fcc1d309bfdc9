"""Buffers of a model, as a forward finds them, as series."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fxguard.history._norms import norms
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import are_alike, part_here, sample_of
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
        self._was_noted = False
        held = [(name, part_here(x)) for name, x in model.named_buffers()]
        found = [(name, x) for name, x in held if x is not None and x.is_floating_point()]
        self._names = [name for name, _ in found]
        with own_arithmetic():
            self._copies = tuple([sample_of(x).clone() for _, x in found])
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
            if self._was_noted:  # or nobody knows what they were
                self.step.note_all(self._drifts, changes, sizes)
            self._was_noted = True
            self.step.note_all(self._sizes, sizes)

    def _samples(self, model: Module) -> tuple[Tensor, ...] | None:
        """None if they are others now."""
        try:
            found = [part_here(model.get_buffer(name)) for name in self._names]
        except AttributeError:
            return None
        samples = tuple([sample_of(x) for x in found if x is not None])
        if len(samples) < len(found) or not all(map(are_alike, samples, self._copies)):
            return None
        return samples
