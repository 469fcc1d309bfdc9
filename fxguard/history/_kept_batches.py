"""Copies of the last batches of a training, to run them again when its loss jumps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fxguard.measure.at_hand import own_arithmetic, version_of

__all__ = ["MOST", "Kept", "KeptBatches", "form_of"]

MOST = 4  # batches
MOST_BYTES = 2**26  # of all copies together


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor as it was, and what it was copied from."""

    numbers: Tensor
    original: weakref.ref[Tensor]
    version: int | None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is the original, and holds the same; NumPy's writes count no version."""
        if self.original() is not tensor or not version_of(tensor) == self.version is not None:
            return False
        return not tensor.is_cpu or torch.equal(tensor, self.numbers)


@dataclass(frozen=True, slots=True)
class _Batch:
    step: int
    number: float  # its loss
    data: tuple[_Copy, ...]


class Kept(NamedTuple):
    """A batch that was kept."""

    step: int
    loss: float  # in that step
    data: list[Tensor]


class KeptBatches:
    """The last batches of each loss."""

    def __init__(self) -> None:
        self._batches: dict[int, deque[_Batch]] = {}  # by the series of the loss
        self.is_too_large = False  # the last batch, on its own

    def keep(self, loss: int, step: int, number: float, data: Sequence[Tensor]) -> None:
        """Copy what a loss was computed from; the oldest copies make room.

        Args:
            loss: position of the series of the loss.
            step: the step that runs.
            number: the loss.
            data: what it was computed from, weights left out.
        """
        batches = self._batches.setdefault(loss, deque(maxlen=MOST))
        size = sum(x.numel() * x.element_size() for x in data)
        self.is_too_large = size > MOST_BYTES
        if self.is_too_large:
            batches.clear()
            return
        last = batches[-1].data if batches else ()
        with own_arithmetic():
            copies = tuple(
                _copied(x, last[i] if i < len(last) else None) for i, x in enumerate(data)
            )
        batches.append(_Batch(step, number, copies))
        self._make_room()

    def has(self, loss: int) -> bool:
        """Whether a batch of a loss is kept."""
        return bool(self._batches.get(loss))

    def before(self, loss: int, like: Sequence[Tensor]) -> Iterator[Kept]:
        """The copies of batches of the same shapes, the last first."""
        for batch in reversed(self._batches.get(loss, ())):
            data = [copy.numbers for copy in batch.data]
            if [*map(form_of, data)] == [*map(form_of, like)]:
                yield Kept(batch.step, batch.number, data)

    def _make_room(self) -> None:
        while self._size() > MOST_BYTES:
            oldest = min((x for x in self._batches.values() if x), key=lambda x: x[0].step)
            oldest.popleft()

    def _size(self) -> int:
        """Bytes of all copies; one that serves several batches counts once."""
        numbers = {
            id(x.numbers): x.numbers
            for batches in self._batches.values()
            for batch in batches
            for x in batch.data
        }
        return sum(x.numel() * x.element_size() for x in numbers.values())


def _copied(tensor: Tensor, before: _Copy | None) -> _Copy:
    """A copy; that of the batch before, if the same tensor still holds the same."""
    if before is not None and before.is_of(tensor):
        return before
    return _Copy(tensor.detach().clone(), weakref.ref(tensor), version_of(tensor))


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """What a copy of a tensor has in common with it, beside its numbers."""
    return tensor.shape, tensor.dtype, tensor.device
