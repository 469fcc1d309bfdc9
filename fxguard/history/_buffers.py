"""Buffers of a model, and weights that are frozen, as a forward finds them, as series."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from fxguard.history._norms import changes
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import are_alike, part_here, sample_of
from fxguard.history._series import BUFFER
from fxguard.measure.at_hand import own_arithmetic

__all__ = ["Buffers"]

SAMPLE = 2**12  # elements: there may be a whole model of frozen weights


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model holds a tensor, and the series of that."""

    module: weakref.ref[Module]
    key: str
    drift: int
    size: int

    def sample(self) -> Tensor | None:
        """What is compared of it; None if it is gone, or is trained from now on."""
        module = self.module()
        if module is None:
            return None
        held = module._buffers.get(self.key)
        return _sample_of(module._parameters.get(self.key) if held is None else held)


class Buffers:
    """Notes what no optimizer steps when a step begins: a later update is one of the next step.

    Args:
        step: the step that runs.
        model: looked at, and not kept.
    """

    def __init__(self, step: OpenStep, model: Module) -> None:
        self.step = step
        self._copies: tuple[Tensor, ...] = ()
        self._was_noted = False
        with own_arithmetic():
            self._places = list(self._held_by(model))

    def note(self) -> None:
        """Note how large they are, and how much they have changed since the last step began."""
        if not self._places:
            return
        with own_arithmetic():
            found = [(each, each.sample()) for each in self._places]
            samples = tuple([sample for _, sample in found if sample is not None])
            if len(samples) < len(found):
                self._places = [each for each, sample in found if sample is not None]
            if len(samples) != len(self._copies) or not all(map(are_alike, samples, self._copies)):
                self._copies, self._was_noted = tuple([x.clone() for x in samples]), False
            found_now = changes(samples, self._copies, most=0)
            if self._was_noted:  # or nobody knows what they were
                drifts = [each.drift for each in self._places]
                self.step.note_all(drifts, found_now.change, found_now.now)
            self._was_noted = True
            self.step.note_all([each.size for each in self._places], found_now.now)

    def _held_by(self, model: Module) -> Iterator[_Place]:
        series, seen = self.step.series, set[int]()
        for prefix, module in model.named_modules():
            for key, held in (*module._buffers.items(), *module._parameters.items()):
                if id(held) in seen or _sample_of(held) is None:
                    continue
                seen.add(id(held))
                name = f"{prefix}.{key}" if prefix else key
                drift = series("drift", name, detail=BUFFER)
                size = series("weight", name, detail=BUFFER)
                yield _Place(weakref.ref(module), key, drift, size)


def _sample_of(held: Tensor | None) -> Tensor | None:
    part = None if held is None or held.requires_grad else part_here(held)
    return None if part is None or not part.is_floating_point() else sample_of(part, SAMPLE)
