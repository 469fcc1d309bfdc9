"""How far gradients are turned between their backward and the step that reads them, as series.

A factor, such as that of a clipped norm or of a loss scale, turns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.history._norms import Number, changes
from fxguard.history._open_step import OpenStep, as_range
from fxguard.history._sample import LARGE, are_alike, parts_here, sample_of
from fxguard.measure import native

__all__ = ["Turned"]

ROUNDING = 1e-4  # of a cosine


class Turned:
    """Compares the gradients of some weights with what the last backward made.

    Args:
        step: the step that runs.
        names: of the weights.
    """

    def __init__(self, step: OpenStep, names: Sequence[str]) -> None:
        self.step = step
        self._series = as_range(
            [
                step.series("gradient", name, order=len(names) - at, detail="turned")
                for at, name in enumerate(names)
            ]
        )
        self._made: dict[int, Tensor] = {}  # by position: as the backward made it
        self._all: tuple[Tensor, ...] = ()  # these, if all weights had gradients

    def backward_ended(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Copy samples of the gradients, as far as there are any."""
        if self._all and native.copied(gradients, self._all, LARGE):
            return
        for at, gradient in enumerate(parts_here(gradients)):
            if gradient is None:
                self._made.pop(at, None)
                continue
            sample, copy = sample_of(gradient), self._made.get(at)
            if copy is None or not are_alike(sample, copy):
                self._made[at] = sample.clone()
            else:
                copy.copy_(sample)
        is_all = len(self._made) == len(gradients)
        self._all = tuple([self._made[at] for at in range(len(gradients))]) if is_all else ()

    def note(self, gradients: tuple[Tensor | None, ...]) -> Sequence[Number] | None:
        """Note by how much each gradient is turned now: 1 less its cosine with the copy.

        Returns:
            The norms of the gradients, or of their samples; None if some could not be compared.
        """
        between = native.changes(gradients, self._all, LARGE) if self._all else None
        if between is None:  # the copies are of no use any more
            self._note_some(parts_here(gradients))
            return None
        is_as_made = not any(between[0])
        turned = [0.0] * len(between[0]) if is_as_made else [*map(_turned, *between)]
        self.step.note_all(self._series, turned)
        return between[1]

    def _note_some(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [
            (self._series[at], gradient, self._made[at])
            for at, gradient in enumerate(gradients)
            if at in self._made and gradient is not None
        ]
        pairs = [each for each in pairs if are_alike(sample_of(each[1]), each[2])]
        now, made = tuple([x for _, x, _ in pairs]), tuple([x for _, _, x in pairs])
        self.step.note_all([at for at, *_ in pairs], [*map(_turned, *changes(now, made))])


def _turned(apart: Number, after: Number, before: Number) -> Number:
    """1 less the cosine of two vectors, given the norm of their difference, and theirs."""
    product = 2 * before * after
    if isinstance(product, Tensor):
        cosine = (before**2 + after**2 - apart**2) / product.where(product > 0, 1.0)
        is_turned = (product > 0) & (cosine < 1 - ROUNDING)
        return torch.where(is_turned, 1 - cosine, 0.0)
    if not 0 < product < math.inf:
        return 0.0
    turned = 1 - (before * before + after * after - apart * apart) / product
    return turned if turned > ROUNDING else 0.0
