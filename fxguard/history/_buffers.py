"""Buffers of a model, and weights that are frozen, as a forward finds them, as series."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Module

from fxguard.history._norms import norms
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import are_alike, part_here, sample_of
from fxguard.history._series import BUFFER
from fxguard.measure.at_hand import own_arithmetic

__all__ = ["Buffers"]

SAMPLE = 2**12  # elements: there may be a whole model of frozen weights


class Buffers:
    """Notes what no optimizer steps when a step begins: a later update is one of the next step.

    Args:
        step: the step that runs.
        model: looked at, and not kept.
    """

    def __init__(self, step: OpenStep, model: Module) -> None:
        self.step = step
        self._known: tuple[str, ...] = ()
        self._copies: tuple[Tensor, ...] = ()
        self._was_noted = False
        with own_arithmetic():
            self._begin_with(dict(_samples(model)))

    def note(self, model: Module) -> None:
        """Note how large they are, and how much they have changed since the last step began."""
        with own_arithmetic():
            found = dict(_samples(model))
            samples = tuple(found.values())
            if tuple(found) != self._known or not all(map(are_alike, samples, self._copies)):
                self._begin_with(found)  # some are trained from now on, or are others
            if not samples:
                return
            changes, sizes = norms(samples, self._copies, most=0), norms(samples, most=0)
            series = self.step.series
            if self._was_noted:  # or nobody knows what they were
                drifts = [series("drift", name, detail=BUFFER) for name in found]
                self.step.note_all(drifts, changes, sizes)
            self._was_noted = True
            self.step.note_all([series("weight", name, detail=BUFFER) for name in found], sizes)

    def _begin_with(self, samples: dict[str, Tensor]) -> None:
        self._known = tuple(samples)
        self._copies = tuple([x.clone() for x in samples.values()])
        self._was_noted = False


def _samples(model: Module) -> Iterator[tuple[str, Tensor]]:
    frozen = ((name, x) for name, x in model.named_parameters() if not x.requires_grad)
    for name, value in (*model.named_buffers(), *frozen):
        part = part_here(value)
        if part is not None and part.is_floating_point():
            yield name, sample_of(part, SAMPLE)
