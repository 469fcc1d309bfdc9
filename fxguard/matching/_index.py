"""The values of one recording, found by what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.matching._layouts import core_of, in_layout_of, mask_of
from fxguard.recording.recorded import Numbers, numbers_of

__all__ = ["Found", "Index"]

COARSE = 4e-2  # relative: what is further apart is not looked at
ROUNDINGS = 1e-9  # relative, of float64: so near are values whatever else is allowed
SMALL = 2**20  # elements: halves of larger values are not looked for


@dataclass(frozen=True, slots=True)
class Found:
    """Where a value was found."""

    values: tuple[int, ...]  # of the recording that was searched; all that hold the same
    same: Tensor | None  # one of them in the layout that was searched for; None for a mask's effect


class Index:
    """The values of a recording by five numbers that no order of elements changes."""

    def __init__(self) -> None:
        self._entries: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        self._rows: dict[int, list[Numbers]] = defaultdict(list)
        self._tables: dict[int, Tensor] = {}

    def add(self, value: int, tensor: Tensor) -> None:
        """Add what a value holds, also without repetitions, as halves, and as a mask."""
        self._add(value, tensor)
        core = core_of(tensor)
        if core.numel() != tensor.numel():
            self._add(value, core)
        mask = mask_of(core)
        if mask is not None:
            self._add(value, mask)
        elif core.numel() <= SMALL and core.dim() and core.shape[-1] % 2 == 0 and core.numel() > 2:
            half = core.shape[-1] // 2
            for part in (core[..., :half], core[..., half:], core[..., ::2], core[..., 1::2]):
                self._add(value, part)

    def add_part(self, value: int, tensor: Tensor) -> None:
        """Add a part of what a value holds."""
        self._add(value, tensor)

    def _add(self, value: int, tensor: Tensor) -> None:
        count = tensor.numel()
        self._entries[count].append((value, tensor))
        self._rows[count].append(numbers_of(tensor))
        self._tables.pop(count, None)

    def find(
        self,
        tensor: Tensor,
        tolerance: Callable[[int], float],
        at_most: Callable[[int], float] | None = None,
    ) -> Found | None:
        """Where a value is: with the same elements, in any order of dimensions or in any order.

        Args:
            tensor: what is searched for.
            tolerance: of differences from a value, relative to the largest magnitude.
            at_most: a bound of it that is known at once.
        """
        found = self._find(tensor, tolerance, at_most or tolerance)
        if found is not None:
            return found
        core = core_of(tensor)
        if core.numel() != tensor.numel():
            found = self._find(core, tolerance, at_most or tolerance)
        if found is None:
            mask = mask_of(core)
            for each in () if mask is None else (mask, ~mask):
                found = found or self._find(each, _nothing, _nothing)
        return None if found is None else Found(found.values, None)

    def _find(
        self,
        tensor: Tensor,
        tolerance: Callable[[int], float],
        at_most: Callable[[int], float],
    ) -> Found | None:
        count = tensor.numel()
        if not count or count not in self._entries:
            return None
        entries = self._entries[count]
        far = self._far(numbers_of(tensor), count)
        near = [int(at) for at in (far <= COARSE).nonzero().flatten()]
        near.sort(key=lambda at: entries[at][1].shape != tensor.shape)
        same: Tensor | None = None
        values: list[int] = []
        for at in near:
            value, other = entries[at]
            if other.dtype.is_complex != tensor.dtype.is_complex:
                continue
            if float(far[at]) > max(4 * at_most(value), 1e-12):
                continue
            if same is None and far[at] <= 4 * ROUNDINGS <= at_most(value) * 4:
                same = in_layout_of(other, tensor, ROUNDINGS)
                if same is not None:
                    values.append(value)
                    continue
            allowed = tolerance(value)
            if float(far[at]) > max(4 * allowed, 1e-12):
                continue
            if same is None:
                same = in_layout_of(other, tensor, allowed)
                if same is None:
                    continue
            values.append(value)
        return None if same is None else Found(tuple(dict.fromkeys(values)), same)

    def _far(self, numbers: Numbers, count: int) -> Tensor:
        """How far the numbers of each value of a size are from some, relative to their size."""
        table = self._tables.get(count)
        if table is None:
            table = torch.tensor(self._rows[count], dtype=torch.float64)
            self._tables[count] = table
        mine = torch.tensor(numbers, dtype=torch.float64)
        scale = torch.stack([mine[1], mine[1], mine[2], mine[3]])
        far = (table[:, :4] - mine[:4]).abs() / torch.where(scale > 0, scale, 1.0)
        return torch.where(table[:, 4] == mine[4], far.amax(1), torch.inf)


def _nothing(value: int) -> float:
    return 0.0
