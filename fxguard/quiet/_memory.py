"""What tensors held when they were made, to see whether one bit of them has changed since.

Three sums of the bits of all elements, as integers, are kept: plain, times a weight of the
element, times the square of that. A flipped bit changes the first by a power of two, and the others
by that times the weight and its square. A write of other numbers does not, not even one that
doubles all of them. So a write that no version counts, as one by other ranks, is no error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxguard.measure.at_hand import own_arithmetic, version_of
from fxguard.measure.parts import part_here
from fxguard.quiet._bits import BITS

__all__ = ["Held", "Memory", "Sums", "flipped_bit", "hold", "sums_of"]

LEAST = 4  # elements: a number alone is doubled by a script, which changes one bit
WEIGHTS = 1022  # of words, in turn: 1 to this; even, so that it tells the halves of a double apart
PIECE = 1 << 22  # elements at a time
WORD = 1 << 64

Sums = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """What a tensor held. It does not keep the tensor alive."""

    memory: StorageWeakRef  # while it lives, no other memory has its address
    version: int | None
    sums: Sums

    def flipped(self, tensor: Tensor) -> int | None:
        """Which bit was flipped although nothing wrote the tensor; None if none was."""
        if self.memory.expired() or self.version is None or self.version != version_of(tensor):
            return None
        now = sums_of(tensor)
        return None if now is None else flipped_bit(self.sums, now, _words_in(tensor))


def hold(tensor: Tensor) -> Held | None:
    """What a tensor holds now; None if that cannot be told."""
    if not tensor.is_floating_point() or tensor.numel() < LEAST:
        return None
    sums = sums_of(tensor)
    if sums is None:
        return None
    return Held(StorageWeakRef(tensor.untyped_storage()), version_of(tensor), sums)


class Memory:
    """What tensors held, by where they are."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], Held] = {}

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note what tensors hold now, after an operation has made or written them."""
        for tensor in tensors:
            if (held := hold(tensor)) is not None:
                self._held[_key(tensor)] = held

    def flipped(self, tensor: Tensor) -> int | None:
        """Which bit of a tensor was flipped although nothing wrote it; None if none was.

        Args:
            tensor: one that is about to be read.
        """
        held = self._held.get(_key(tensor))
        bit = None if held is None else held.flipped(tensor)
        if bit is not None:
            self.note([tensor])
        return bit

    def forget(self) -> None:
        """Begin anew."""
        self._held.clear()


def sums_of(tensor: Tensor) -> Sums | None:
    """The three sums of a tensor's bits; None if it cannot be read."""
    part = part_here(tensor)
    if part is None or part.element_size() not in BITS or part.is_complex():
        return None
    with own_arithmetic(), torch.no_grad():
        word = BITS[min(part.element_size(), 4)]  # in which sums of long words would overflow
        flat = part.detach().contiguous().flatten().view(word)
        totals = torch.zeros(3, dtype=torch.int64, device=flat.device)
        for start in range(0, len(flat), PIECE):
            bits = flat[start : start + PIECE].to(torch.int64)
            index = torch.arange(start, start + len(bits), device=flat.device)
            weights = index % WEIGHTS + 1
            weighed = bits * weights
            totals += torch.stack([bits.sum(), weighed.sum(), (weighed * weights).sum()])
        first, second, third = totals.tolist()
    return first, second, third


def _words_in(tensor: Tensor) -> int:
    return max(tensor.element_size() // 4, 1)


def flipped_bit(before: Sums, now: Sums, words: int = 1) -> int | None:
    """Which bit of one element was flipped between two sums; None if it was not one bit.

    Args:
        before: the sums.
        now: those of now.
        words: how many words of 32 bits an element is; 1 for shorter ones.

    Example:
        >>> flipped_bit((8, 16, 32), (12, 24, 48))  # 4 in the second element
        2
    """
    first, second, third = (
        (b - a + WORD // 2) % WORD - WORD // 2 for a, b in zip(before, now, strict=True)
    )
    size = abs(first)
    if not size or size & (size - 1) or second % size:
        return None
    weight = second // first
    is_one = 1 <= weight <= WEIGHTS and third == first * weight * weight
    return size.bit_length() - 1 + 32 * ((weight - 1) % words) if is_one else None


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two objects that hold the same elements, as a saved tensor and the original."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
