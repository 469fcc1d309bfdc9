"""How far gradients are turned between their backward and the step that reads them, as series.

A factor, such as that of a clipped norm or of a loss scale, turns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fxguard.history._norms import Number, changes
from fxguard.history._open_step import OpenStep, as_range
from fxguard.history._sample import LARGE, are_alike, sample_of
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

    def backward_ended(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy samples of the gradients, as far as there are any."""
        if len(self._made) == len(gradients):
            made = tuple([self._made[at] for at in range(len(gradients))])
            given = tuple([x for x in gradients if x is not None])
            if native.changes(given, made, LARGE) is not None:  # which copies
                return
        for at, gradient in enumerate(gradients):
            if gradient is None:
                self._made.pop(at, None)
                continue
            sample, copy = sample_of(gradient), self._made.get(at)
            if copy is None or not are_alike(sample, copy):
                self._made[at] = sample.clone()
            else:
                copy.copy_(sample)

    def note(self, gradients: Sequence[Tensor | None]) -> None:
        """Note by how much each gradient is turned now: 1 less its cosine with the copy."""
        pairs = [
            (at, gradient, self._made[at])
            for at, gradient in enumerate(gradients)
            if at in self._made and gradient is not None
        ]
        now, made = tuple([x for _, x, _ in pairs]), tuple([x for _, _, x in pairs])
        between: Iterable[Sequence[Number]] | None
        between = native.changes(now, made, LARGE)  # the copies are of no use any more
        if between is None:
            pairs = [each for each in pairs if are_alike(sample_of(each[1]), each[2])]
            now, made = tuple([x for _, x, _ in pairs]), tuple([x for _, _, x in pairs])
            between = changes(now, made)
        is_all = len(pairs) == len(self._series)
        series = self._series if is_all else [self._series[at] for at, *_ in pairs]
        self.step.note_all(series, [*map(_turned, *between)])


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
