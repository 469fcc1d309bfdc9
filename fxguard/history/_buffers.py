"""Buffers of a model, and weights that are frozen, as a forward finds them, as series."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from fxguard.history._norms import changes
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import are_alike, sample_of
from fxguard.history._series import BUFFER
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.parts import part_here

__all__ = ["Buffers"]

SAMPLE = 2**12  # elements: there may be a whole model of frozen weights


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model holds a tensor, and the series of that."""

    module: weakref.ref[Module]
    key: str
    drift: int
    size: int

    def held(self) -> Tensor | None:
        """The tensor; None if it is gone."""
        module = self.module()
        if module is None:
            return None
        held = module._buffers.get(self.key)
        return module._parameters.get(self.key) if held is None else held


class Buffers:
    """Notes what no optimizer steps when a step begins: a later update is one of the next step.

    Args:
        step: the step that runs.
        model: looked at, and not kept.
        is_stepped: whether optimizers step the weights that are trained; if not, as where a script
            steps copies of them, they are noted here.
    """

    def __init__(self, step: OpenStep, model: Module, *, is_stepped: bool) -> None:
        self.step = step
        self._is_stepped = is_stepped
        with own_arithmetic():
            self._places = list(self._held_by(model))
        self._copies: list[Tensor | None] = [None] * len(self._places)

    def note(self) -> None:
        """Note how large they are, and how much they have changed since the last step began."""
        if not self._places:
            return
        with own_arithmetic():
            samples = [_sample_of(each.held()) for each in self._places]
            known = list[tuple[_Place, Tensor, Tensor]]()
            for at, (place, x, copy) in enumerate(
                zip(self._places, samples, self._copies, strict=True)
            ):
                if x is not None and copy is not None and are_alike(x, copy):
                    known.append((place, x, copy))
                else:  # nobody knows what it was
                    self._copies[at] = None if x is None else x.clone()
            places, now, copies = zip(*known, strict=True) if known else ((), (), ())
            found = changes(now, copies, most=0)
            self.step.note_all([each.drift for each in places], found.change, found.now)
            self.step.note_all([each.size for each in places], found.now)
        self._forget_trained()

    def _forget_trained(self) -> None:
        """What an optimizer steps from now on is noted with the others."""
        stays = [self._is_noted(each.held()) for each in self._places]
        if not all(stays):
            self._places = list(itertools.compress(self._places, stays))
            self._copies = list(itertools.compress(self._copies, stays))

    def _is_noted(self, held: Tensor | None) -> bool:
        return held is not None and not (self._is_stepped and held.requires_grad)

    def _held_by(self, model: Module) -> Iterator[_Place]:
        series, seen = self.step.series, set[int]()
        for prefix, module in model.named_modules():
            for key, held in (*module._buffers.items(), *module._parameters.items()):
                is_noted = id(held) not in seen and self._is_noted(held)
                if not is_noted or _sample_of(held) is None:
                    continue
                seen.add(id(held))
                name = f"{prefix}.{key}" if prefix else key
                drift = series("drift", name, detail=BUFFER)
                size = series("weight", name, detail=BUFFER)
                yield _Place(weakref.ref(module), key, drift, size)


def _sample_of(held: Tensor | None) -> Tensor | None:
    part = None if held is None else part_here(held)
    return None if part is None or not part.is_floating_point() else sample_of(part, SAMPLE)
