"""Columns of a table that hold far larger numbers than the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Columns", "large_columns"]

MOST_NAMED = 3
MOST_COLUMNS = 1024  # of a table: more are pixels or embeddings
FAR = 100.0  # times the largest magnitude of all others


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table with large numbers."""

    indices: tuple[int, ...]
    most: float  # the largest magnitude in them
    others: float  # in all others


def large_columns(table: Tensor) -> Columns | None:
    """The columns whose largest magnitudes are far above those of all others; None if none are.

    Args:
        table: a dense tensor with a row for each sample.

    Example:
        >>> large_columns(torch.tensor([[1.0, 2e5, 3.0], [4.0, 1e5, 0.5]]))
        Columns(indices=(1,), most=200000.0, others=4.0)
    """
    if table.dim() != 2 or table.is_complex() or not 2 <= table.shape[1] <= MOST_COLUMNS:
        return None
    if not len(table):
        return None
    largest = [float(x) for x in table.detach().abs().amax(0)]
    order = sorted(range(len(largest)), key=lambda index: largest[index], reverse=True)
    if not math.isfinite(largest[order[0]]):
        return None
    for count in range(1, min(MOST_NAMED, len(order) // 2) + 1):
        least, others = largest[order[count - 1]], largest[order[count]]
        if least > FAR * others:
            return Columns(tuple(sorted(order[:count])), largest[order[0]], others)
    return None
