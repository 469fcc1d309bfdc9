"""How far a run of a model in a dtype is from what it should be, and whether that is good enough.

What it should be are outputs in float64, and gradients of weights in the model's own dtype. A
gradient that is 0 by mathematics, such as that of a bias before a batch norm, is nothing but
roundings in every dtype: it is compared with the size of what was added up to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxguard.graph.wide_form import widened
from fxguard.rerun.differences import relative_error

__all__ = ["Bar", "Error", "Wanted", "largest"]

# Gradients below this share of the largest gradient of all weights may be nothing but roundings.
SMALL_GRADIENT = 1e-3

WORSE_THAN_BEST = 3.0  # times: an error that is no larger is about as small as can be

# In units of eps: errors that are always good enough, of outputs and of gradients.
ROUNDINGS, ROUNDINGS_OF_GRADIENTS = 1.0, 16.0
TOLERANCE = 2.0  # in units of eps, of the root mean square: four units of roundoff


@dataclass(frozen=True, slots=True)
class Error:
    """How far the results of a run are from what they should be.

    ``outputs`` and ``gradients`` are the largest error of a tensor, relative to its largest
    magnitude; inf if an element is not finite and should be, NaN if nothing is known.
    """

    outputs: float
    gradients: float = math.nan  # of weights
    root_mean_square: float = math.nan  # of the worst output, relative to that of the output
    dead: frozenset[str] = frozenset()  # weights whose gradient is 0 throughout and should not be

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite that should be."""
        return self.outputs != math.inf and self.gradients != math.inf

    def is_as_good(self, other: Error, eps: float, factor: float = 1.1) -> bool:
        """Whether the error is no worse than another one.

        Args:
            other: the other one.
            eps: eps of the dtype; smaller errors do not count.
            factor: how many times larger than the other one it may be.
        """
        pairs = (
            (self.outputs, other.outputs),
            (self.gradients, other.gradients),
            (self.root_mean_square, other.root_mean_square),
        )
        is_worse = any(mine > max(factor * theirs, eps) for mine, theirs in pairs)
        return self.is_finite and self.dead <= other.dead and not is_worse


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar for a plan: what is good enough.

    Args:
        best: the least error that was reached.
        eps: eps of the dtype.
        tolerance: how large the root mean square of the outputs' error may be, relative to that of
            the output; None for four units of roundoff.
    """

    best: Error
    eps: float
    tolerance: float | None = None

    @property
    def of_outputs(self) -> float:
        """The largest relative root mean square of the outputs' error."""
        return TOLERANCE * self.eps if self.tolerance is None else self.tolerance

    def is_near(self, error: Error) -> bool:
        """Whether outputs and gradients are about as good as they can be."""
        pairs = (
            (error.outputs, self.best.outputs, ROUNDINGS),
            (error.root_mean_square, self.best.root_mean_square, ROUNDINGS),
            (error.gradients, self.best.gradients, ROUNDINGS_OF_GRADIENTS),
        )
        is_worse = any(
            mine > max(WORSE_THAN_BEST * best, floor * self.eps) for mine, best, floor in pairs
        )
        return error.is_finite and error.dead <= self.best.dead and not is_worse

    def is_within(self, error: Error) -> bool:
        """Whether the outputs' error is within the tolerance."""
        return error.root_mean_square <= self.of_outputs


@dataclass(slots=True)
class Wanted:
    """What a run should give."""

    outputs: list[Tensor | None] = field(default_factory=list)  # None where it is not known
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)  # of what was added up to a gradient

    def distance(self, outputs: Sequence[Tensor], gradients: Mapping[str, Tensor]) -> Error:
        """The error of outputs, and of gradients if there are some."""
        pairs = [
            (output, widened(wanted, torch.float64))
            for output, wanted in zip(outputs, self.outputs, strict=True)
            if wanted is not None
        ]
        errors = [_largest_error(output, wanted) for output, wanted in pairs]
        squares = [_root_mean_square(output, wanted) for output, wanted in pairs]
        floor = SMALL_GRADIENT * max(map(largest, self.gradients.values()), default=0.0)
        of_gradients = [
            relative_error(
                gradient, self.gradients[name].double(), max(floor, self.sizes.get(name, 0.0))
            )
            for name, gradient in gradients.items()
            if name in self.gradients
        ]
        return Error(
            max(errors, default=math.nan),
            max(of_gradients, default=math.nan),
            max(squares, default=math.nan),
            frozenset(self._dead(gradients)) if gradients else frozenset(),
        )

    def _dead(self, gradients: Mapping[str, Tensor]) -> Iterable[str]:
        for name, wanted in self.gradients.items():
            roundings = self.sizes.get(name, 0.0) * torch.finfo(wanted.dtype).eps
            is_meant = largest(wanted) > 2 * roundings
            if is_meant and not (name in gradients and bool(gradients[name].any())):
                yield name


def largest(value: Tensor) -> float:
    """The largest magnitude of a tensor; 0 if it is empty."""
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _largest_error(low: Tensor, wanted: Tensor) -> float:
    """The largest error; inf also where the tensor is to be infinite and is not."""
    if low.shape != wanted.shape:
        return math.inf
    is_other = ~wanted.isfinite() & (low.to(wanted.dtype) != wanted)
    return math.inf if bool(is_other.any()) else relative_error(low, wanted)


def _root_mean_square(low: Tensor, wanted: Tensor) -> float:
    """The relative root mean square of the error where the tensor is to be finite."""
    if low.shape != wanted.shape:
        return math.inf
    finite = wanted.isfinite()
    gap, size = (low.to(wanted.dtype) - wanted)[finite].norm(), wanted[finite].norm()
    if not gap.isfinite():
        return math.inf
    return float(gap / size) if size else float(gap > 0)
