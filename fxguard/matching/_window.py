"""Which part of A's batch B computed: one row of it, or some positions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.recording.recorded import Leaf, Recording

__all__ = ["Window", "window_of"]

MOST = 4096  # places that are looked at


@dataclass(frozen=True, slots=True)
class _Part:
    dim: int  # of the input
    size: int  # in A
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Window:
    """A part of each tensor that has the sizes of a batch.

    A dimension is one of samples or positions if it has that size in A; samples are the first one
    of these only. Samples that are merged with positions or heads are found in front.
    """

    parts: tuple[_Part, ...]

    def of(self, x: Tensor) -> Tensor:
        """The part of a tensor; all of it where it has no such size."""
        if not x.dim():
            return x
        sizes = [part.size for part in self.parts]
        if len(sizes) > 1 and x.shape[0] == sizes[0] * sizes[1]:
            inner = Window(self.parts).of(x.unflatten(0, sizes[:2]))
            return inner.flatten(0, 1)
        for part in self.parts:
            dims = [dim for dim, size in enumerate(x.shape) if size == part.size]
            if part.dim == 0:
                dims = dims[:1]
                if not dims and x.shape[0] % part.size == 0:
                    merged = x.unflatten(0, (part.size, -1)).narrow(0, part.start, part.count)
                    x = merged.flatten(0, 1)
            for dim in dims:
                x = x.narrow(dim, part.start, part.count)
        return x

    def __str__(self) -> str:
        words = []
        for part in self.parts:
            last = part.start + part.count - 1
            what, them = ("sample", "samples") if part.dim == 0 else ("position", "positions")
            which = f"{what} {last}" if part.count == 1 else f"{them} {part.start} to {last}"
            words.append(f"{which} of {part.size}")
        return " and ".join(words)


def window_of(a: Recording, b: Recording) -> Window | None:
    """The part of A's inputs that B's are; None if they have equal sizes, or B's are no such part.

    Sizes that weights have, too, are not told from those of a batch: then there is none either.
    """
    theirs = {leaf.name: leaf for leaf in a.leaves if leaf.kind == "input"}
    for mine in b.leaves:
        other = theirs.get(mine.name)
        if mine.kind != "input" or other is None:
            continue
        x, y = a.data.get(other.value), b.data.get(mine.value)
        if x is None or y is None or x.shape == y.shape or x.dim() != y.dim():
            continue
        parts = _parts(x, y)
        sizes = [part.size for part in parts]
        of_weights = {
            n for leaf in a.leaves if _is_weight(leaf) for n in a.values[leaf.value].shape
        }
        if parts and len(set(sizes)) == len(sizes) and of_weights.isdisjoint(sizes):
            return Window(parts)
        return None
    return None


def _parts(x: Tensor, y: Tensor) -> tuple[_Part, ...]:
    """The one place in a tensor where another one is; none if there are several."""
    dims = [dim for dim in range(x.dim()) if x.shape[dim] != y.shape[dim]]
    if any(y.shape[dim] > x.shape[dim] for dim in dims):
        return ()
    starts = [range(x.shape[dim] - y.shape[dim] + 1) for dim in dims]
    found = []
    for place in itertools.islice(itertools.product(*starts), MOST):
        window = x
        for dim, start in zip(dims, place, strict=True):
            window = window.narrow(dim, start, y.shape[dim])
        if torch.equal(window, y):
            found.append(place)
    if len(found) != 1:
        return ()
    return tuple(
        _Part(dim, x.shape[dim], start, y.shape[dim])
        for dim, start in zip(dims, found[0], strict=True)
    )


def _is_weight(leaf: Leaf) -> bool:
    return leaf.kind in ("weight", "buffer")
