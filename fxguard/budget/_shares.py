"""Weighs the own error of each operation by the gradient of the number that matters.

To first order, the error of a number ``y`` is the sum over all operations of ``own * adjoint``: the
operation's own error, an element at a time, times the gradient of ``y`` with respect to its result
(Linnainmaa 1976; CHEF-FP and ADAPT do so for C++). Roundings are about independent, so that the
contribution of an operation has the square ``sum((own * adjoint) ** 2)`` (Higham and Mary 2019).
One whose elements err in one direction has a bias, ``sum(own * adjoint) ** 2``, far larger than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxguard.budget._room import Room

__all__ = ["Origin", "Shares"]

BIASED = 9.0  # times: the square of a sum that is so much larger is not by chance


@dataclass(slots=True)
class Origin:
    """An operation whose results have an own error, or a weight or an input that was rounded."""

    own: float = 0.0  # sum of the squares of its own errors
    size: float = 0.0  # sum of the squares of what it made
    count: int = 0  # how often it ran
    left_out: int = 0  # elements that are not finite
    sums: list[float] = field(default_factory=list)  # of own * adjoint, for each projection
    squares: list[float] = field(default_factory=list)  # of (own * adjoint) ** 2

    @property
    def relative(self) -> float:
        """The root mean square of its own error, relative to that of what it made."""
        if not self.size:  # float64 makes zeros
            return math.inf if self.own else 0.0
        return math.sqrt(self.own / self.size)

    def contributions(self) -> Iterator[float]:
        """The square of what it adds to the error of each projection."""
        for total, squares in zip(self.sums, self.squares, strict=True):
            square = total * total  # inf, where a power would raise
            yield square if square > BIASED * squares else squares


class Shares:
    """The own errors of one run, by what they come from.

    Args:
        room: keeps own errors until the backward.

    Attributes:
        origins: by any key, in the order of the run.
        projections: how many numbers have been differentiated.
        listens: whether adjoints count. Else they are those of another backward.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.origins: dict[Hashable, Origin] = {}
        self.projections = 0
        self.listens = True

    def of(self, key: Hashable) -> Origin:
        """What is known of an operation."""
        return self.origins.setdefault(key, Origin())

    def begin(self) -> None:
        """Adjoints that come from now on are those of the next number."""
        self.projections += 1
        for origin in self.origins.values():
            origin.sums.append(0.0)
            origin.squares.append(0.0)

    def restart(self) -> None:
        """Forget the adjoints that have come."""
        self.projections = 0
        for origin in self.origins.values():
            origin.sums, origin.squares = [], []

    def predicted(self) -> list[float]:
        """The error of each number, to first order."""
        return [
            sum(origin.sums[each] for origin in self.origins.values())
            for each in range(self.projections)
        ]

    def add(self, key: Hashable, low: Tensor, exact: Tensor, wide: Tensor) -> None:
        """Note what an operation made, and wait for its adjoint.

        Args:
            key: the operation.
            low: its result in the model.
            exact: its result in float64, on the operands that it had in the model.
            wide: its result in the float64 run, which has a gradient.
        """
        own = low.detach().to(exact.dtype) - exact.detach()
        origin = self.of(key)
        squares = square_of(own)
        if not math.isfinite(squares):
            finite = own.isfinite()
            own, exact = own.where(finite, 0.0), exact.where(finite, 0.0)
            origin.left_out += int(finite.numel() - finite.sum())
            squares = square_of(own)
        origin.size += square_of(exact)
        if not squares:
            return
        origin.own += squares
        if wide.requires_grad:
            # An error has few digits: half the memory until the backward.
            kept = self.room.keep(own.to(torch.complex64 if own.is_complex() else torch.float32))
            wide.register_hook(lambda adjoint: self._came(origin, kept, adjoint))

    def _came(self, origin: Origin, kept: Callable[[], Tensor], adjoint: Tensor | None) -> None:
        if adjoint is None or not self.listens:  # one of several results, which nobody reads
            return
        parts = kept().to(adjoint.dtype) * adjoint.conj().resolve_conj()
        parts = parts.real if parts.is_complex() else parts
        total, squares = float(parts.sum()), square_of(parts)
        if not math.isfinite(squares):  # as at the root of 0
            parts = parts.where(parts.isfinite(), 0.0)
            total, squares = float(parts.sum()), square_of(parts)
        origin.sums[-1] += total
        origin.squares[-1] += squares


def square_of(value: Tensor) -> float:
    """The sum of the squares of all magnitudes."""
    value = value.detach().reshape(-1)
    flat = torch.view_as_real(value.resolve_conj()).reshape(-1) if value.is_complex() else value
    return float(flat.dot(flat))
