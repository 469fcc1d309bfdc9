"""Parts of A's values that ranks of B hold, or that they take one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from fxguard.matching._layouts import distance, layouts_of
from fxguard.recording.recorded import RANKS, Recording

__all__ = ["Shards", "shards_of"]

SMALL_BATCHES = 8  # of a pipeline
LARGEST = 2**22  # elements of a value whose parts are looked for


@dataclass(frozen=True, slots=True)
class Shards:
    """Into how many equal parts a dimension of A's values may be divided.

    Args:
        ways: into how many.
        counts: elements that values of B have; no other part is looked for.
    """

    ways: frozenset[int] = frozenset()
    counts: frozenset[int] = frozenset()

    def of(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The parts of a value, each with its place."""
        if x.numel() > LARGEST:
            return
        for ways in sorted(self.ways):
            for dim, size in enumerate(x.shape):
                width = math.ceil(size / ways)
                if width and x.numel() // size * width in self.counts and size >= ways > 1:
                    yield from enumerate(x.split(width, dim))

    def like(self, x: Tensor, other: Tensor, place: int | None) -> Tensor | None:
        """The part of a value that is nearest to another one.

        Args:
            x: the value of A.
            other: what B has in place of a part of it.
            place: of the part, if none is near.
        """
        found: list[tuple[float, bool, Tensor]] = []
        for at, part in self.of(x):
            if part.numel() == other.numel():
                far = min((distance(y, other) for y in layouts_of(part, other)), default=math.inf)
                found.append((min(far, 1.0), at != place, part))
        return min(found, key=lambda each: each[:2])[2] if found else None


def shards_of(a: Recording, b: Recording) -> Shards:
    """The parts of A's values that the ranks of B may hold."""
    ways = set() if RANKS in a.about else set(_of_ranks(b))
    return Shards(frozenset(ways), frozenset(value.count for value in b.values))


def _of_ranks(recording: Recording) -> Iterable[int]:
    """The sizes that groups of ranks may have, and how many small batches they may take."""
    ranks = recording.about.get(RANKS)
    if isinstance(ranks, int):
        yield from (size for size in range(2, ranks + 1) if ranks % size == 0)
        yield from range(2, SMALL_BATCHES + 1)
