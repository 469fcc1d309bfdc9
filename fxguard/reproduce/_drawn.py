"""Random operands with the same ranges as the operands of one operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import is_float

__all__ = ["drawn_like"]

SEEDS = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """The known properties of a tensor whose numbers are not revealed."""

    low: float  # the smallest finite element, signed; 0 if there is none
    high: float
    # The share of its elements that are 0, NaN, inf, -inf.
    shares: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @classmethod
    def of(cls, tensor: Tensor) -> Drawn:
        """Measure a tensor; complex ones by their real part."""
        x = tensor.detach()
        x = (x.real if x.is_complex() else x).to(torch.float64)
        if not x.numel():
            return cls(0.0, 0.0)
        finite = x[torch.isfinite(x)]
        low, high = map(float, torch.aminmax(finite)) if finite.numel() else (0.0, 0.0)
        special = (x == 0, torch.isnan(x), x == torch.inf, x == -torch.inf)
        zero, nan, inf, ninf = (float(each.double().mean()) for each in special)
        return cls(low, high, (zero, nan, inf, ninf))

    def like(self, tensor: Tensor, generator: torch.Generator, *, by_magnitude: bool) -> Tensor:
        """Random numbers with the shape and dtype of a tensor.

        Args:
            tensor: a tensor with the shape and dtype.
            generator: the random generator.
            by_magnitude: whether all magnitudes are equally likely, rather than all numbers.
        """
        shape = tensor.shape
        if not is_float(tensor):
            whole = torch.randint(int(self.low), int(self.high) + 1, shape, generator=generator)
            return whole.to(tensor.dtype)
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        if by_magnitude:
            share = share**8
            flip = torch.rand(shape, generator=generator) < 0.5
            share = torch.where(flip, share, 1 - share)
        x = self.low + (self.high - self.low) * share
        special = torch.rand(shape, generator=generator, dtype=torch.float64)
        bound = 0.0
        numbers = (0.0, float("nan"), float("inf"), -float("inf"))
        for number, part in zip(numbers, self.shares, strict=True):
            x[(special >= bound) & (special < bound + part)] = number
            bound += part
        return x.to(tensor.dtype)


def drawn_like(operation: OneOperation) -> Iterator[OneOperation]:
    """The same operation on random numbers with its operands' ranges, drawn in several ways.

    Args:
        operation: an operation whose operands have the desired shapes, dtypes and ranges.
    """
    ranges = tuple(map(Drawn.of, operation.tensors))
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        pairs = zip(operation.tensors, ranges, strict=True)
        yield operation.with_tensors(
            [known.like(x, generator, by_magnitude=bool(seed % 2)) for x, known in pairs]
        )
