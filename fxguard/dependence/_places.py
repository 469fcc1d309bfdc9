"""Places: to which sample and which position an element of a value belongs, by its dimensions.

Nobody says what the dimensions of a value are. So each dimension whose size fits is taken for that
of samples, or of positions, in each way in which programs lay them out; a change is where it
belongs if it is so in one of them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OfLaterPositions", "OfOneSample", "OfPadding", "Places"]

MOST_SHIFT = 64  # positions that a value may have more than the input
MOST_CUT = 4  # the part of the positions that a value may have less


class Places(abc.ABC):
    """Where changes belong."""

    @abc.abstractmethod
    def hold(self, changed: Tensor) -> bool:
        """Whether all changes of a value are where they belong, in some layout.

        Args:
            changed: which elements have changed; boolean, of the shape of the value.
        """


@dataclass(frozen=True)
class OfOneSample(Places):
    """The elements of one sample.

    Args:
        batch: how many samples there are.
        sample: the one.
        groups: the sample of each element of dimensions of other sizes, such as the graph of each
            node.
    """

    batch: int
    sample: int
    groups: tuple[Tensor, ...] = ()

    def hold(self, changed: Tensor) -> bool:
        return any(
            not bool((along & (owner != self.sample)).any())
            for along in _along(changed)
            for owner in self._owners(len(along))
        )

    def _owners(self, size: int) -> Iterator[Tensor]:
        yield from _samples(size, self.batch)
        yield from (each for each in self.groups if len(each) == size)


@dataclass(frozen=True)
class OfLaterPositions(Places):
    """The elements of positions after one."""

    length: int  # how many positions there are
    position: int

    def hold(self, changed: Tensor) -> bool:
        return any(
            not bool((along & (owner <= self.position)).any())
            for along in _along(changed)
            for owner in _positions(len(along), self.length)
        )


@dataclass(frozen=True, eq=False)
class OfPadding(Places):
    """The elements of positions that are padding."""

    padding: Tensor  # [batch, length], boolean

    def hold(self, changed: Tensor) -> bool:
        batch, length = self.padding.shape
        real = ~self.padding
        for along in _along(changed):  # samples and positions in one dimension
            for rows in (real.flatten(), real.T.flatten()):
                if len(along) % len(rows) == 0:
                    each = len(along) // len(rows)
                    if not bool((along & rows.repeat_interleave(each)).any()):
                        return True
        for one in range(changed.dim()):
            for two in range(changed.dim()):
                if one == two:
                    continue
                rest = [d for d in range(changed.dim()) if d not in (one, two)]
                both = changed.any(rest) if rest else changed
                both = both if one < two else both.T
                for owner in _samples(both.shape[0], batch):
                    for position in _positions(both.shape[1], length, shifted=False):
                        if not bool((both & real[owner][:, position]).any()):
                            return True
        return False


def _along(changed: Tensor) -> Iterator[Tensor]:
    """For each dimension, at which of its indices there is a change."""
    for dim in range(changed.dim()):
        rest = [d for d in range(changed.dim()) if d != dim]
        yield changed.any(rest) if rest else changed


def _samples(size: int, batch: int) -> Iterator[Tensor]:
    """The sample of each index of a dimension that holds samples, or samples and something else."""
    if size and size % batch == 0:
        yield torch.arange(size) // (size // batch)
        if size != batch:
            yield torch.arange(size) % batch


def _positions(size: int, length: int, *, shifted: bool = True) -> Iterator[Tensor]:
    """The position of each index of a dimension that holds positions."""
    index = torch.arange(size)
    if size and size % length == 0:
        yield index // (size // length)
        if size != length:
            yield index % length
    elif size > 1 and length % size == 0:  # stretches of positions: the last one of each
        yield (index + 1) * (length // size) - 1
    is_near = -length // MOST_CUT <= size - length <= MOST_SHIFT
    if shifted and size != length and is_near:  # padded, or cut
        least, most = min(0, size - length), max(0, size - length)
        yield from (index - shift for shift in range(least, most + 1))
