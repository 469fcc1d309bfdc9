"""Which weights of two models are the same, by their elements: also if fused or transposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.matching._index import Index
from fxguard.matching._layouts import apart

__all__ = ["Twin", "twins_of"]

FEW = 0.5  # share of rows from which on a weight is said to be made of others
WINDOW = 4  # neighbours of a projection that are looked at


@dataclass(frozen=True, slots=True)
class Twin:
    """What a weight is in the other model."""

    of: tuple[int, ...]  # the weights that it holds
    content: Tensor  # their elements in its layout; its own where no row is theirs
    is_whole: bool  # whether all of it is theirs
    differs: float = 0.0  # how far it is from them, relative to the largest, where it is not
    part: tuple[int, int] | None = None  # the dimension along which it is a part of one, its start


def twins_of(
    mine: Mapping[int, Tensor], others: Mapping[int, Tensor], tolerance: float
) -> dict[int, Twin]:
    """For each weight the ones of another model that it holds.

    Args:
        mine: weights in float64.
        others: those of the other model.
        tolerance: of roundings, relative to the largest of a weight.
    """
    index = Index()
    for value, x in others.items():
        index.add(value, x)
    rows = _Rows(others, tolerance)
    found = {}
    for value, x in mine.items():
        whole = index.find(x, lambda value: tolerance)
        if whole is not None and whole.same is not None and whole.same.shape == x.shape:
            found[value] = Twin(whole.values, whole.same, is_whole=True)
            continue
        twin = _part(x, others, tolerance) or rows.of(x) or _pieces(x, others, tolerance)
        if twin is not None:
            found[value] = twin
    taken = {each for twin in found.values() for each in twin.of}
    for value, x in mine.items():
        if value in found:
            continue
        left = [(apart(y, x), other) for other, y in others.items() if y.shape == x.shape]
        left = [each for each in left if each[1] not in taken]
        if left and min(left)[0] < 1:
            far, other = min(left)
            found[value] = Twin((other,), x, is_whole=False, differs=far)
    return found


class _Rows:
    """The rows of weights, found by projections."""

    def __init__(self, others: Mapping[int, Tensor], tolerance: float) -> None:
        self.tolerance = tolerance
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        by_width: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for value, x in others.items():
            if x.dim() >= 2 and x.is_floating_point():
                flat = x.reshape(x.shape[0], -1)
                by_width[flat.shape[1]].append((flat, value))
                if (x.dim() == 2 and x.shape[0] != x.shape[1]) or x.dim() == 2:
                    by_width[x.shape[0]].append((x.t(), value))
        for width, pieces in by_width.items():
            table = torch.cat([x for x, _ in pieces])
            owner = torch.cat([torch.full((len(x),), value) for x, value in pieces])
            projected, order = (table @ _directions(width)).sort()
            self._tables[width] = table[order], owner[order], projected

    def of(self, x: Tensor) -> Twin | None:
        """What a weight is made of, by rows or by columns."""
        if x.dim() < 2 or not x.is_floating_point():
            return None
        flat = x.reshape(x.shape[0], -1)
        by_row = self._of(flat)
        if (by_row is not None and by_row.is_whole) or x.dim() != 2:
            return None if by_row is None else _shaped(by_row, x)
        by_column = self._of(flat.t())
        if by_column is not None and (by_row is None or by_column.is_whole):
            return Twin(by_column.of, by_column.content.t().contiguous(), by_column.is_whole)
        return by_row

    def _of(self, x: Tensor) -> Twin | None:
        known = self._tables.get(x.shape[1])
        if known is None:
            return None
        table, owner, projected = known
        mine = x @ _directions(x.shape[1])
        at = torch.searchsorted(projected, mine)
        largest = float(x.abs().max()) or 1.0
        content, of = x.clone(), torch.full((len(x),), -1)
        best = torch.full((len(x),), float("inf"), dtype=x.dtype)
        for step in range(-WINDOW, WINDOW):
            place = (at + step).clamp(0, len(table) - 1)
            far = (table[place] - x).abs().amax(1)
            closer = (far <= self.tolerance * largest) & (far < best)
            best = torch.where(closer, far, best)
            content[closer] = table[place[closer]]
            of[closer] = owner[place[closer]]
        share = float((of >= 0).double().mean())
        if share < FEW:
            return None
        return Twin(tuple(int(v) for v in of[of >= 0].unique()), content, is_whole=share == 1)


def _shaped(twin: Twin, like: Tensor) -> Twin:
    return Twin(twin.of, twin.content.reshape(like.shape), twin.is_whole)


def _pieces(x: Tensor, others: Mapping[int, Tensor], tolerance: float) -> Twin | None:
    """A vector that is several vectors of the other model, one after the other."""
    if x.dim() != 1 or not x.is_floating_point():
        return None
    content, is_known, of = x.clone(), torch.zeros(len(x), dtype=torch.bool), []
    largest = float(x.abs().max())
    for value, y in _vectors(others):
        if len(y) >= len(x):
            continue
        for start in ((x[: len(x) - len(y) + 1] - y[0]).abs() <= tolerance * largest).nonzero():
            at = int(start)
            if float((x[at : at + len(y)] - y).abs().max()) <= tolerance * largest:
                content[at : at + len(y)], is_known[at : at + len(y)] = y, True
                of.append(value)
                break
    return Twin(tuple(of), content, bool(is_known.all())) if of else None


def _part(x: Tensor, others: Mapping[int, Tensor], tolerance: float) -> Twin | None:
    """A weight that is a part of one of the other model: a rank's, say."""
    if not x.is_floating_point() or x.numel() < 2 or bool((x == x.flatten()[0]).all()):
        return None
    largest = float(x.abs().max())
    for value, y in others.items():
        if y.dim() != x.dim() or y.numel() <= x.numel():
            continue
        unlike = [dim for dim in range(x.dim()) if x.shape[dim] != y.shape[dim]]
        if len(unlike) != 1 or y.shape[unlike[0]] < x.shape[unlike[0]]:
            continue
        (dim,) = unlike
        size = x.shape[dim]
        first = x.select(dim, 0)
        far = (y - first.unsqueeze(dim)).abs().movedim(dim, 0).reshape(y.shape[dim], -1).amax(1)
        for start in (far[: y.shape[dim] - size + 1] <= tolerance * largest).nonzero():
            part = y.narrow(dim, int(start), size)
            if float((part - x).abs().max()) <= tolerance * largest:
                return Twin((value,), part, is_whole=True, part=(dim, int(start)))
    return None


def _vectors(others: Mapping[int, Tensor]) -> Iterable[tuple[int, Tensor]]:
    return ((v, y) for v, y in others.items() if y.dim() == 1 and len(y) > 1)


def _directions(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator, dtype=torch.float64)
