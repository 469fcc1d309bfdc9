"""Values in two forms, for Python code of higher-order operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["Two", "joined", "parts", "same_leaves", "stacked"]


class Two:
    """A value in both forms, for Python code of a higher-order operation."""

    def __init__(self, low: Any, other: Any) -> None:
        self.low = low
        self.other = other

    def __getitem__(self, index: Any) -> Two:
        return Two(self.low[index], self.other[index])

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.low.shape
        return shape

    def __len__(self) -> int:
        return len(self.low)


def stacked(rows: Sequence[Any]) -> Any:
    """The results of iterations, as one tensor in each form."""
    low, other = parts(tuple(rows))
    if all(x is y for x, y in zip(low, other, strict=True)):
        return torch.stack(low)
    dtype = max((x.dtype for x in other), key=lambda dtype: dtype.itemsize)
    return Two(torch.stack(low), torch.stack([x.to(dtype) for x in other]))


def parts(values: Any) -> tuple[Any, Any]:
    """Both forms of a value in which some leaves have two forms."""
    low = pytree.tree_map(lambda x: x.low if isinstance(x, Two) else x, values)
    other = pytree.tree_map(lambda x: x.other if isinstance(x, Two) else x, values)
    return low, other


def joined(low: Any, other: Any) -> Any:
    """The inverse: leaves with two forms where they differ."""
    return pytree.tree_map(lambda x, y: x if x is y else Two(x, y), low, other)


def same_leaves(low: Any, other: Any) -> bool:
    """Whether two values consist of the same objects."""
    one, two = pytree.tree_leaves(low), pytree.tree_leaves(other)
    return len(one) == len(two) and all(x is y for x, y in zip(one, two, strict=True))
